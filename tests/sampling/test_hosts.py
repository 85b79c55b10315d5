"""Two processes that share one mesh make the same decisions, and sample what one process does."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from . import small as S


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(port: int, process: int) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    return subprocess.Popen(
        [sys.executable, "-m", "tests.sampling.hosts", str(port), str(process)], cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "XLA_FLAGS": flags},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_two_processes_decide_and_sample_as_one():
    port = free_port()
    processes = [start(port, i) for i in range(2)]
    try:
        shown = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, shown, strict=True):
        assert process.returncode == 0, errors[-3000:]
    leader, follower = (json.loads(out.splitlines()[-1]) for out, _ in shown)
    assert leader["decisions"] == follower["decisions"]
    assert leader["version"] == follower["version"] == 1
    assert leader["decisions"]["free_slots"] == S.OPTIONS.slots

    async def alone(scheduler):
        async def talk(i):
            stream, answers = S.prompt(5 + 6 * i, i), []
            for turn in range(2):
                done = await scheduler.complete(
                    S.request(stream, 6 + i, session=f"s{i}", seed=i)
                )
                answers.append(done.ids.tolist())
                stream = np.concatenate([stream, done.ids, S.prompt(4, turn)])
            return answers

        return await asyncio.gather(*map(talk, range(6)))

    assert leader["answers"] == S.run(alone)
    new = S.run(lambda s: s.complete(S.request(S.prompt(9), 5)), seed=1)
    assert leader["new"] == new.ids.tolist()
