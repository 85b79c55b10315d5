"""What an agent or a task leaves to break the runner: logs, files, places that cannot be copied."""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from sandbox import local
from sandbox.agents import Nop, Script
from sandbox.base import RefusedError, SandboxBrokenError
from sandbox.environment import environment_of
from sandbox.reports import Report
from sandbox.trial import run_trial
from sandbox.verify import judge
from tests.sandbox.test_audit import t1jax
from tests.sandbox.test_trial import SEPARATE, SOLVE, TEST_SH, on_local, task_of

NOISE = "python3 -c \"import os,socket; os.chdir('{}'); [socket.socket(socket.AF_UNIX).bind("
NOISE += "'{}%d' % i) for i in range(1500)]\""  # tar says a line for each: far over a pipe's 64 KiB
DEEP = "cd /app; n=$(printf 'd%.0s' $(seq 250)); for i in $(seq 60); do mkdir $n && cd $n; done"
LEFT = {
    "a link as reward": "ln -sf /etc/passwd /logs/verifier/reward.json",
    "a link as directory": "rm -rf /logs/verifier; ln -s /etc /logs/verifier",
    "a link to its own place": "rm -rf /logs/verifier; ln -s . /logs/verifier",
    "a file as directory": "rm -rf /logs/verifier; echo 1 > /logs/verifier",
    "a name that is no UTF-8": "touch $'/logs/verifier/a\\xff.json' $'/logs/verifier/a\\nb.json'",
    "a name with a surrogate": """echo '{"\\ud800": 1}' > /logs/verifier/reward.json""",
    "a huge number": "printf '{\"a\": 1%0400d}' 0 > /logs/verifier/reward.json",
    "thousands of reports": "cd /logs/verifier; touch {1..3000}.json",
    "sockets": NOISE.format("/logs/verifier", "x" * 60) + "; rm /logs/verifier/reward.json",
}


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
def test_whatever_is_left_in_the_logs_is_0_of_n_and_a_complete_result(tmp_path, left):
    test = TEST_SH + "[ ! -e /app/run.sh ] || . /app/run.sh\n"
    task = task_of(tmp_path / "task", test=test)
    agent = Script((*SOLVE, f"cat > run.sh <<'END'\n{left}\nEND"))
    result = on_local(lambda b: run_trial(task, agent, b, tmp_path / "trial"))
    fields = json.loads((tmp_path / "trial/result.json").read_text())
    assert (fields["outcome"], fields["passed"], fields["total"]) == ("failed", [], 2)
    assert "keeps the verifier from reporting" in result.verdict.flags[0]
    assert len(json.dumps(fields)) < 20_000


@pytest.mark.parametrize(
    ("mess", "outcome"), [(NOISE.format("/app", "x" * 80), "solved"), (DEEP, "failed")]
)
def test_what_tar_has_much_to_say_of_does_not_hang_a_trial(tmp_path, mess, outcome):
    task = task_of(tmp_path / "task")

    async def use(backend):
        async with asyncio.timeout(60):
            agent = Script((*SOLVE, mess))
            return await run_trial(task, agent, backend, tmp_path / "trial")

    assert on_local(use).outcome == outcome


def test_a_copy_has_a_deadline_and_a_trial_with_one_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "TRANSFER_TIMEOUT_S", 0.0)

    async def use(backend):
        environment = environment_of(task_of(tmp_path / "task"), "local")
        async with backend.sandbox(dataclasses.replace(environment, files=None)) as box:
            await box.read_archive("/app")

    with pytest.raises(SandboxBrokenError, match="no copy within 0 s: tar --create"):
        on_local(use)


def test_flags_are_few_and_short_whatever_the_agent_does():
    problems = ["\udcff" * 999] * 99
    verdict = judge(Report(source="ctrf", assertions={"a": 1}, rewards={}, problems=problems))
    assert len(verdict.flags) == 20
    assert max(map(len, verdict.flags)) == 500
    assert verdict.flags[0].startswith("\\udcff\\udcff")


@pytest.mark.parametrize("place", ["/etc", "//etc/", "/etc/motd", "/opt", "/./usr", "/sbin"])
def test_an_artifact_where_nothing_can_be_copied_is_refused_before_anything_runs(tmp_path, place):
    task = task_of(tmp_path / "task", toml=f'artifacts = ["{place}"]\n' + SEPARATE)
    with pytest.raises(RefusedError, match=r"a fresh verifier cannot take over /[a-z]"):
        on_local(lambda b: run_trial(task, Nop(), b, tmp_path / "trial"))
    assert not (tmp_path / "trial").exists()


def test_a_trial_without_a_verdict_prints_its_result_all_the_same(tmp_path):
    root = task_of(tmp_path / "task", test="#!/bin/bash\ntrue\n").root
    done = t1jax("trial", root, "--agent", "nop", "--out", tmp_path / "kept")
    fields = json.loads(done.stdout)
    assert (done.returncode, fields["outcome"], fields["graded"]) == (1, "infra_error", False)
    assert "the verifier reports nothing" in fields["error"]
    kept = json.loads((Path(fields["folder"]) / "result.json").read_text())
    assert (kept["outcome"], Path(fields["folder"]).parent) == ("infra_error", tmp_path / "kept")
