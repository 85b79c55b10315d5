"""The adapter to Harbor's environments, over one that runs its commands in a local sandbox."""

import shlex
import types
from pathlib import Path

import pytest

from sandbox.base import TIMEOUT_EXIT_CODE, TooLargeError
from sandbox.harbor import HarborBox


class Hosted:
    """What Harbor's services offer: single commands and single files, with real processes."""

    def __init__(self, box):
        self.box = box
        self.deleted = False

    async def start(self, force_build):
        assert not force_build

    async def stop(self, delete):
        self.deleted = delete

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        done = await self.box.exec_once(
            f"bash -c {shlex.quote(command)}", timeout_s=timeout_sec, cwd=cwd or "", env=env,
            max_output_bytes=1 << 24,
        )  # fmt: skip
        return types.SimpleNamespace(stdout=done.output, stderr="", return_code=done.exit_code)

    async def upload_file(self, source_path, target_path):
        await self.box.upload(Path(source_path), target_path)

    async def download_file(self, source_path, target_path):
        await self.box.download(source_path, Path(target_path))


@pytest.mark.parametrize("kind", ["local"])
def test_the_adapter_keeps_the_contract(boxes, tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("content\n")

    async def use(box):
        hosted = Hosted(box)
        async with HarborBox(hosted, boxes.environment(), "hosted") as harbor:
            first = await harbor.exec("cd /tmp; export A='x y'; echo out; echo err >&2; exit 3",
                                      timeout_s=20)  # fmt: skip
            assert (first.output, first.exit_code) == ("out\nerr\n", 3)
            assert (await harbor.exec("pwd; echo $A", timeout_s=20)).output == "/tmp\nx y\n"
            assert (await harbor.exec_once("pwd; echo $A", timeout_s=20)).output == "/app\n\n"
            slow = await harbor.exec("trap '' TERM; sleep 99", timeout_s=1)
            assert slow.timed_out and slow.exit_code == TIMEOUT_EXIT_CODE and slow.seconds < 6
            long = await harbor.exec("head -c 3M /dev/zero; exit 7", timeout_s=20)
            assert long.truncated and long.exit_code == 7
            await harbor.upload(tmp_path / "tree", "/deep/er/tree")
            await harbor.download("/deep/er/tree", tmp_path / "back")
            with pytest.raises(FileNotFoundError):
                await harbor.download("/nothing", tmp_path / "nothing")
            with pytest.raises(TooLargeError):
                await harbor.download("/deep/er/tree", tmp_path / "large", max_bytes=10)
            await harbor.exec("setsid sleep 98 >/dev/null & true", timeout_s=20)
            await harbor.end_processes()
            assert (await harbor.exec("pgrep -c sleep; pwd", timeout_s=20)).output == "0\n/app\n"
        assert hosted.deleted

    boxes.run(use)
    assert (tmp_path / "back" / "file").read_text() == "content\n"
