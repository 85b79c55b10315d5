"""What is inside a sandbox cannot reach out, and nothing of it stays."""

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sandbox import archives, cgroups, janitor
from sandbox.base import Archive, Environment, Network, TooLargeError, make_backend
from t1jax.errors import UserError


def with_command_line(text: str) -> list[psutil.Process]:
    """Processes of this machine, those in sandboxes included."""
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if text in " ".join(p.info["cmdline"] or ())]


def wait_until(true: Callable[[], bool]) -> None:
    """Fails where it has not come true after a while."""
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_of_the_host_but_its_programs_can_be_read(boxes, tmp_path):
    (tmp_path / "secret").write_text("host secret")
    tries = [
        f"cat {tmp_path}/secret",
        f"cat /proc/1/root{tmp_path}/secret",
        f"cat /proc/*/root{tmp_path}/secret",
        f"test -e {Path(__file__).parent}",
        "cat /etc/shadow | grep -v '[*!]'",
        "ls -A /home /srv /mnt /media 2>/dev/null | grep -v :$ | grep .",
        "cat /var/run/docker.sock /run/docker.sock",
        "grep -z '[p]ytest' /proc/[0-9]*/cmdline",
        "mount -t tmpfs none /mnt",
        "unshare --user true",
        "unshare --user --map-root-user true",
        "unshare --mount true",
        "mknod /tmp/disk b 254 0 && head -c1 /tmp/disk",
        "echo 1 > /proc/sys/kernel/panic",
        "echo max > /sys/fs/cgroup/pids/pids.max",
        "test -e /sys/fs/cgroup/pids.max && echo max > /sys/fs/cgroup/pids.max",
        "dmesg | grep .",
    ]

    async def use(box):
        for command in tries:
            done = await box.exec(f"({command}) 2>/dev/null", timeout_s=20)
            assert done.exit_code != 0, (command, done.output)
        status = await box.exec("grep -c 'NoNewPrivs:.1' /proc/self/status", timeout_s=10)
        assert status.output == "1\n"

    boxes.run(use)


@pytest.mark.parametrize("kind", ["local"])
def test_a_local_sandbox_has_no_capability_and_a_read_only_system(boxes):
    async def use(box):
        capabilities = await box.exec("grep Cap /proc/self/status | cut -f2 | sort -u", timeout_s=9)
        assert capabilities.output == "0" * 16 + "\n"
        for path in ("/usr/x", "/usr/bin/x", "/bin/x", "/lib/x", "/etc/x", "/opt/x", "/dev/x"):
            assert (await box.exec(f"echo > {path}", timeout_s=9)).exit_code != 0, path
        for path in ("/usr", "/bin", "/lib", "/etc", "/opt", "/opt/verifier"):
            moved = await box.exec(f"mv {path} /tmp/ || rm -r {path}", timeout_s=20)
            assert moved.exit_code != 0, path

    boxes.run(use)


def test_without_network_there_is_no_way_to_the_host(boxes):
    listener = socket.create_server(("0.0.0.0", 0))
    port = listener.getsockname()[1]
    heard = []

    def listen():
        while True:
            try:
                heard.append(listener.accept()[1])
            except OSError:
                return

    thread = threading.Thread(target=listen)
    thread.start()
    addresses = {"127.0.0.1", "10.0.2.2", "172.17.0.1"}
    for found in psutil.net_if_addrs().values():
        addresses |= {a.address for a in found if a.family == socket.AF_INET}

    async def use(box):
        shown = await box.exec("tail -n +3 /proc/net/dev | cut -d: -f1", timeout_s=10)
        assert shown.output.split() in (["lo"], [])
        for address in sorted(addresses):
            done = await box.exec(f"timeout 3 bash -c '>/dev/tcp/{address}/{port}'", timeout_s=10)
            assert done.exit_code != 0, address

    try:
        boxes.run(use, network=Network.NONE)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
    assert heard == []


def test_sandboxes_do_not_see_each_other(boxes):
    async def use(one, other):
        await one.exec("echo mine > /tmp/mine; (exec -a first sleep 300 &)", timeout_s=10)
        seen = "cat /tmp/mine; grep -la first /proc/[0-9]*/cmdline; kill -0 -1 && echo others"
        done = await other.exec(f"({seen}) 2>/dev/null", timeout_s=10)
        assert done.output in ("", "others\n")  # its own shell is one

    boxes.run(use, count=2)


def test_files_come_and_go_as_they_are(boxes, tmp_path):
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "sub" / "bytes").write_bytes(bytes(range(256)) * 5000)
    (tree / "link").symlink_to("sub/bytes")

    async def use(box):
        await box.exec("mkdir -p /data/old; ln -s /usr /data/new; mkdir /app/x", timeout_s=10)
        await box.upload(tree, "/data/old")  # replaces
        await box.upload(tree, "/data/new")  # replaces the link, not what it points at
        done = await box.exec("ls /data/old; /data/new/run.sh; stat -c %a-%U /data/new/run.sh",
                              timeout_s=10)  # fmt: skip
        assert done.output == "link\nrun.sh\nsub\nran\n755-root\n"
        await box.upload(tree / "run.sh", "/deep/er/name with space")
        await box.download("/deep/er/name with space", tmp_path / "one")
        await box.download("/data/new", tmp_path / "back")
        with pytest.raises(FileNotFoundError, match=r"no /nothing in sandbox"):
            await box.download("/nothing", tmp_path / "nothing")
        with pytest.raises(TooLargeError, match="larger than 100000 bytes"):
            await box.download("/data/new", tmp_path / "large", max_bytes=100_000)
        with pytest.raises(ValueError, match="absolute"):
            await box.download("app", tmp_path / "relative")

    boxes.run(use)
    assert (tmp_path / "one").read_text() == "#!/bin/sh\necho ran\n"
    assert (tmp_path / "back" / "link").readlink() == Path("sub/bytes")
    assert (tmp_path / "back" / "sub" / "bytes").read_bytes() == bytes(range(256)) * 5000
    assert (tmp_path / "back" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "one", "tree"]


def test_links_that_an_agent_plants_lead_nowhere(boxes, tmp_path):
    (tmp_path / "secret").write_text("host secret")

    async def use(box):
        plant = f"mkdir out; ln -s {tmp_path}/secret out/file; ln -s / out/root"
        await box.exec(plant, timeout_s=10)
        with pytest.raises(UserError, match="download refused"):
            await box.download("/app/out", tmp_path / "got")
        await box.exec("mv out/root /tmp; ln -s /etc/hostname plain", timeout_s=10)
        with pytest.raises(UserError, match="download refused"):
            await box.download("/app/plain", tmp_path / "got")

    boxes.run(use)
    assert not (tmp_path / "got").exists()


@pytest.mark.parametrize("name", ["../evil", "/evil", "top/../../evil"])
def test_an_archive_cannot_write_outside_its_destination(tmp_path, name):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("top/fine"))
        tar.addfile(tarfile.TarInfo(name))
    inner = tmp_path / "inner"
    inner.mkdir()
    with pytest.raises((UserError, ValueError)):
        archives.unpack(Archive.of_bytes(content.getvalue()), inner / "dst", max_bytes=1 << 20)
    assert [p.name for p in tmp_path.rglob("*")] == ["inner"]


RUNNER = """
import asyncio, sys
from pathlib import Path
from sandbox.base import BASE_IMAGE, Environment, Network, make_backend

async def main(kind, endpoints, mark):
    backend = make_backend(kind, endpoints=endpoints, run_id=mark)
    environment = Environment(name="t", image=BASE_IMAGE, local=True, network=Network.NONE)
    async with backend.sandbox(environment) as box:
        await box.exec(f"setsid sleep {mark} & trap '' TERM HUP", timeout_s=10)
        print("started", flush=True)
        await box.exec(f"sleep {mark}", timeout_s=500)

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_runner_that_is_killed_leaves_no_process_and_no_container(boxes):
    mark = f"99{os.getpid()}.5"
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, boxes.kind, boxes.endpoints, mark],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert runner.stdout is not None
    with runner.stdout:
        assert runner.stdout.readline() == "started\n"
        wait_until(lambda: len(with_command_line(f"sleep {mark}")) == 2)
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    wait_until(lambda: not with_command_line(f"sleep {mark}"))
    if boxes.kind == "docker":
        asyncio.run(janitor.clean(endpoints=boxes.endpoints))
        label = f"--filter=label=t1jax.run={mark}"
        left = ["docker", "--host", boxes.endpoints, "ps", "-aq", label]
        assert subprocess.run(left, check=True, capture_output=True).stdout == b""
    else:
        for group in cgroups.leftovers():
            group.remove()
        groups = Path("/sys/fs/cgroup").rglob(f"{cgroups.PREFIX}{runner.pid}-*")
        assert list(groups) == []


def test_an_environment_that_is_not_local_is_refused_with_the_reason():
    from sandbox.local import LocalBackend

    backend = LocalBackend()
    assert "needs an image" in backend.refusal(Environment(name="x", image="debian"))
    assert "user 'agent'" in backend.refusal(Environment(name="x", local=True, user="agent"))
    allowlist = Environment(name="x", local=True, network=Network.ALLOWLIST)
    assert "allowlist" in backend.refusal(allowlist)


def test_files_are_there_before_setup_runs_in_the_working_directory(tmp_path):
    (tmp_path / "start.txt").write_text("one\n")

    async def use():
        environment = Environment(
            name="t", local=True, files=tmp_path, setup="cat start.txt > seen; pwd >> seen",
            workdir="/work here", network=Network.NONE,
        )  # fmt: skip
        async with make_backend("local").sandbox(environment) as box:
            return await box.exec("cat seen", timeout_s=10)

    assert asyncio.run(use()).output == "one\n/work here\n"
