"""One trial's life on real sandboxes: verdicts, forgeries, limits, faults, cancelling."""

import asyncio
import contextlib
import json
import time

import pytest

from sandbox import task as tasks
from sandbox.agents import Nop, Oracle, Replay, Script
from sandbox.base import BASE_IMAGE, InfraError, make_backend
from sandbox.cheat import Cheat
from sandbox.pool import Gate, Room, run_all
from sandbox.tasks.make import make
from sandbox.trial import STAGES, TrialConfig, run_trial
from sandbox.verify import Baseline, Outcome
from t1jax.errors import UserError

SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'
LOCAL = '[environment]\nnetwork_mode = "no-network"\nstorage_mb = 32\n[environment.local]\n'
# Two assertions, as reward.json: a quick verifier without pytest.
TEST_SH = """#!/bin/bash
cd /app
a=0; b=0
[ "$(cat a.txt)" = 1 ] && a=1
[ "$(cat b.txt)" = 2 ] && b=1
echo "{\\"a\\": $a, \\"b\\": $b}" > /logs/verifier/reward.json
"""
SOLVE = ("echo 1 > a.txt", "echo 2 > b.txt")


def task_of(root, *, toml="", test=TEST_SH, files=None):
    """A handmade task that runs on both back ends."""
    given = {
        "task.toml": (toml or SEPARATE) + LOCAL,
        "instruction.md": "Write 1 to a.txt and 2 to b.txt.",
        "environment/Dockerfile": f"FROM {BASE_IMAGE}\nCOPY files/ /app/\nWORKDIR /app\n",
        "environment/files/given.txt": "given\n",
        "solution/solve.sh": "cd /app\n" + "\n".join(SOLVE),
        "tests/test.sh": test,
    }
    for name, text in (given | (files or {})).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tasks.load(root)


@pytest.fixture
def trial(kind, endpoints, tmp_path):
    """Runs one trial of a task on each back end in turn; its folder is the result's."""

    def run(task, agent, **options):
        async def main():
            backend = make_backend(kind, endpoints=endpoints)
            try:
                return await run_trial(task, agent, backend, tmp_path / "trial", **options)
            finally:
                await backend.close()

        return asyncio.run(main())

    return run


def on_local(use):
    """Runs `use(backend)` where the back end makes no difference."""

    async def main():
        backend = make_backend("local")
        try:
            return await use(backend)
        finally:
            await backend.close()

    return asyncio.run(main())


def test_the_oracle_solves_and_leaves_a_complete_directory(trial, tmp_path):
    result = trial(task_of(tmp_path / "task"), Oracle())
    assert (result.outcome, result.attempts) == (Outcome.solved, 1)
    fields = json.loads((result.folder / "result.json").read_text())
    assert fields == result.to_json()
    assert (fields["outcome"], fields["passed"], fields["total"]) == ("solved", ["a", "b"], 2)
    assert (fields["nop_passed"], fields["gained"]) == (None, None)  # no audit says
    assert set(fields["seconds"]) == set(STAGES)
    assert all(fields["seconds"][stage] > 0 for stage in ("start", "agent", "verify", "stop"))
    assert (result.folder / "verifier/reward.json").is_file()
    trajectory = (result.folder / "trajectory.jsonl").read_text().splitlines()
    assert [json.loads(line)["exit_code"] for line in trajectory] == [0]


def test_doing_nothing_fails_and_half_is_partial(tmp_path):
    task = task_of(tmp_path / "task")
    nop = on_local(lambda b: run_trial(task, Nop(), b, tmp_path / "nop"))
    half = on_local(lambda b: run_trial(task, Script(SOLVE[:1]), b, tmp_path / "half"))
    assert (nop.outcome, half.outcome) == (Outcome.failed, Outcome.partial)
    assert half.verdict.reward("fraction") == 0.5


def test_a_replayed_trajectory_ends_as_the_recorded_one(tmp_path):
    task = task_of(tmp_path / "task")
    script = Script(("x=1", "echo $x > a.txt", *SOLVE[1:]))
    first = on_local(lambda b: run_trial(task, script, b, tmp_path / "first"))
    again = Replay(first.folder / "trajectory.jsonl")
    second = on_local(lambda b: run_trial(task, again, b, tmp_path / "second"))
    assert (first.outcome, second.outcome) == (Outcome.solved, Outcome.solved)
    assert (second.commands, second.agent) == (3, "replay")


FORGERIES = {
    "reward file": 'echo \'{"a": 1, "b": 1}\' > /logs/verifier/reward.json',
    "reward writer": 'setsid bash -c \'trap "" TERM HUP; while :; do '
    'echo "{\\"a\\": 1, \\"b\\": 1}" > /logs/verifier/reward.json; done\' > /dev/null 2>&1 &',
    "tests by a link": "mkdir f; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt' "
    "> f/test.sh; chmod +x f/test.sh; rm -rf /tests; ln -s /app/f /tests",
    "PATH and BASH_ENV": "printf '#!/bin/sh\\necho 1' > cat; chmod +x cat; export PATH=/app:$PATH "
    "BASH_ENV=/app/given.txt; echo 'export PATH=/app:$PATH' >> ~/.bashrc",
    "answer by a link": "ln -s /proc/self/environ a.txt; ln -s /tests/test.sh b.txt",
}


@pytest.mark.parametrize("verification", ["fresh", "shared"])
def test_forgeries_gain_nothing(trial, tmp_path, verification):
    """All in one trial: none may cost the others their chance."""
    agent = Script(tuple(FORGERIES.values()))
    config = TrialConfig(verification=verification)
    result = trial(task_of(tmp_path / "task"), agent, config=config)
    assert (result.outcome, result.verdict.passed) == (Outcome.failed, frozenset())


def test_what_an_agent_leaves_in_the_logs_takes_no_part(trial, tmp_path):
    """Not even against itself: shared verification starts from an empty directory."""
    agent = Script((*SOLVE, "echo '{' > /logs/verifier/ctrf.json"))
    config = TrialConfig(verification="shared")
    result = trial(task_of(tmp_path / "task"), agent, config=config)
    assert (result.outcome, result.verdict.flags) == (Outcome.solved, ())


@pytest.mark.parametrize("verification", ["fresh", "shared"])
def test_the_cheat_gains_nothing(trial, tmp_path, verification):
    """On a shipped task; tests of the audit run it on all families."""
    make(tmp_path / "made", count=1, seed=11, families=("files",), levels=(1,))
    (root,) = tasks.find(tmp_path / "made/train")
    config = TrialConfig(verification=verification)
    result = trial(tasks.load(root), Cheat(), config=config)
    assert result.outcome == Outcome.failed
    assert result.verdict.passed == frozenset()


@pytest.mark.docker
def test_a_replaced_program_forges_only_under_shared_and_is_flagged(engine, tmp_path):
    """What kill and wipe cannot stop: the reason for `fresh`."""
    task = task_of(
        tmp_path / "task", test="#!/bin/bash\npython3 -c 'print(0)' > /logs/verifier/reward.txt"
    )
    forge = Script(("rm /usr/bin/python3; printf '#!/bin/sh\\necho 1' > /usr/bin/python3; "
                    "chmod +x /usr/bin/python3",))  # fmt: skip

    async def both():
        backend = make_backend("docker", endpoints=engine)
        try:
            return [
                await run_trial(
                    task, forge, backend, tmp_path / v, config=TrialConfig(verification=v)
                )
                for v in ("fresh", "shared")
            ]
        finally:
            await backend.close()

    fresh, shared = asyncio.run(both())
    assert (fresh.outcome, fresh.verdict.flags) == (Outcome.failed, ())
    assert shared.outcome == Outcome.solved
    assert "the agent changed /usr/bin/python3" in shared.verdict.flags


def test_an_agent_out_of_time_is_verified_all_the_same(trial, tmp_path):
    agent = Script((*SOLVE, "sleep 300"))
    begin = time.monotonic()
    result = trial(task_of(tmp_path / "task"), agent, config=TrialConfig(agent_timeout_s=2))
    assert result.outcome == Outcome.agent_timeout
    assert (len(result.verdict.passed), result.verdict.total) == (2, 2)
    assert time.monotonic() - begin < 60


def test_a_verifier_out_of_time_is_its_own_outcome(tmp_path):
    toml = SEPARATE + "timeout_sec = 0.5\n"
    task = task_of(tmp_path / "task", toml=toml, test="#!/bin/bash\nsleep 300\n")
    result = on_local(lambda b: run_trial(task, Oracle(), b, tmp_path / "trial"))
    assert (result.outcome, result.verdict.passed) == (Outcome.verifier_timeout, frozenset())


def test_an_agent_that_breaks_the_report_gets_0_of_the_oracles_number(tmp_path):
    """The verifier does report without its work, so that it is to blame."""
    broken = TEST_SH + "[ -e /app/break ] && echo nonsense > /logs/verifier/reward.json\n"
    task = task_of(tmp_path / "task", test=broken)
    agent = Script((*SOLVE, "touch break"))
    result = on_local(lambda b: run_trial(task, agent, b, tmp_path / "trial"))
    assert (result.outcome, len(result.verdict.passed), result.verdict.total) == ("failed", 0, 2)
    assert "keeps the verifier from reporting" in result.verdict.flags[0]


@pytest.mark.parametrize("test", ["exit 1", "echo nan > /logs/verifier/reward.txt"])
def test_a_verifier_that_never_reports_is_an_infrastructure_error(tmp_path, test):
    task = task_of(tmp_path / "task", test=f"#!/bin/bash\n{test}\n")
    result = on_local(lambda b: run_trial(task, Oracle(), b, tmp_path / "trial"))
    assert (result.outcome, result.verdict, result.attempts) == (Outcome.infra_error, None, 2)
    fields = json.loads((tmp_path / "trial/result.json").read_text())
    assert fields["graded"] is False
    assert not {"passed", "gained", "rewards"} & set(fields)


class Failing:
    """A back end whose first sandboxes cannot start."""

    name = "local"

    def __init__(self, backend, failures):
        self._backend, self.left = backend, failures

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def sandbox(self, environment):
        if self.left:
            self.left -= 1
            raise InfraError("the engine is gone")
        return self._backend.sandbox(environment)


@pytest.mark.parametrize(("failures", "outcome"), [(1, Outcome.solved), (2, Outcome.infra_error)])
def test_an_infrastructure_error_is_retried_once(tmp_path, failures, outcome):
    task = task_of(tmp_path / "task")
    result = on_local(lambda b: run_trial(task, Oracle(), Failing(b, failures), tmp_path / "trial"))
    assert (result.outcome, result.attempts) == (outcome, 2)
    assert (result.verdict is None) == (outcome == Outcome.infra_error)


def test_a_healthcheck_is_waited_for_and_its_failure_is_no_fault_of_the_agent(tmp_path):
    check = '[environment.healthcheck]\ncommand = "{}"\ninterval_sec = 0.05\nretries = 3\n'
    third = "echo >> /tmp/n; test $(wc -l < /tmp/n) = 3"
    for name, command, outcome in (("a", third, "solved"), ("b", "false", "infra_error")):
        root = tmp_path / name
        task_of(root)
        (root / "task.toml").write_text(SEPARATE + LOCAL + check.format(command))
        result = on_local(
            lambda b, root=root: run_trial(tasks.load(root), Oracle(), b, root / "trial")
        )
        assert result.outcome == outcome, result.error
    assert "healthcheck failed 3 times" in result.error


def test_collect_shows_what_a_program_does_without_running_it_where_it_is_judged(trial, tmp_path):
    """One collect command runs too long; what was collected before still counts."""
    collect = "".join(
        f'[[verifier.collect]]\ncommand = "bash /app/p.sh {n} > /app/{name}.txt"\ntimeout_sec = 1\n'
        for name, n in (("a", 1), ("b", 2))
    )
    task = task_of(tmp_path / "task", toml=SEPARATE + collect)
    program = "echo 'test $1 = 2 && sleep 300; echo $1; echo 1 > /logs/verifier/reward.txt' > p.sh"
    result = trial(task, Script((program,)))
    assert (result.outcome, result.verdict.passed) == (Outcome.partial, frozenset("a"))
    assert "a collect command ran out of its 1 s" in result.verdict.flags


def test_modes_links_and_removed_files_reach_a_fresh_verifier(trial, tmp_path):
    test = """#!/bin/bash
cd /app
stat -c %a a.txt > /logs/verifier/mode; readlink l >> /logs/verifier/mode
test -e given.txt; echo "$?" >> /logs/verifier/mode
echo 1 > /logs/verifier/reward.txt
"""
    agent = Script(("echo 1 > a.txt", "chmod 750 a.txt", "ln -s a.txt l", "rm given.txt"))
    result = trial(task_of(tmp_path / "task", test=test), agent)
    assert (result.folder / "verifier/mode").read_text().split() == ["750", "a.txt", "1"]


def test_a_link_in_the_place_of_the_work_is_not_followed(trial, tmp_path):
    """The verifier would otherwise see what the link leads to in its own sandbox."""
    agent = Script((*SOLVE, "cp -r /app /tmp/x; cd /; rm -rf /app; ln -s /tmp/x /app"))
    result = trial(task_of(tmp_path / "task"), agent)
    assert (result.outcome, result.verdict.passed) == (Outcome.failed, frozenset())
    assert "/app is a link, which is not followed" in result.verdict.flags


def test_the_denominator_of_an_audit_holds_in_a_trial(tmp_path):
    baseline = Baseline(oracle_passed=frozenset("abcd"), nop_passed=frozenset("a"))
    task = task_of(tmp_path / "task")
    result = on_local(lambda b: run_trial(task, Oracle(), b, tmp_path / "trial", baseline=baseline))
    assert (result.outcome, len(result.verdict.passed), result.verdict.total) == ("partial", 2, 4)
    assert result.verdict.gained == pytest.approx(1 / 3)


def test_a_cancelled_trial_says_so_and_removes_its_sandbox(tmp_path):
    """Cancelled in the agent's stage, from outside."""
    task = task_of(tmp_path / "task")
    stopped = []

    async def use(backend):
        sandbox = backend.sandbox

        def watched(environment):
            box = sandbox(environment)
            stop = box.stop

            async def noted():
                await stop()
                stopped.append(box.name)

            box.stop = noted
            return box

        backend.sandbox = watched
        running = asyncio.create_task(
            run_trial(task, Script(("sleep 300",)), backend, tmp_path / "cancelled")
        )
        while not (tmp_path / "cancelled/trajectory.jsonl").exists():
            await asyncio.sleep(0.01)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    on_local(use)
    fields = json.loads((tmp_path / "cancelled/result.json").read_text())
    assert (fields["outcome"], fields["graded"], len(stopped)) == ("cancelled", False, 1)


def test_a_task_that_the_back_end_cannot_run_is_refused_by_name(tmp_path):
    root = tmp_path / "task"
    task_of(root)
    (root / "task.toml").write_text('[environment]\ndocker_image = "some/image:1"\n')
    with pytest.raises(UserError, match="image"):
        on_local(lambda b: run_trial(tasks.load(root), Nop(), b, tmp_path / "trial"))


def test_a_fresh_verifier_takes_over_nothing_that_it_has_to_trust(tmp_path):
    task = task_of(tmp_path / "task", toml='artifacts = ["/app", "/tests/x"]\n' + SEPARATE)
    with pytest.raises(UserError, match="cannot take over /tests/x; name the task's artifacts"):
        on_local(lambda b: run_trial(task, Nop(), b, tmp_path / "trial"))


def test_64_trials_at_once_are_bounded_and_all_end(tmp_path):
    """Never more than the gate lets through, and each has its own files."""
    task = task_of(tmp_path / "task")
    results, running, most = [], 0, 0

    async def use(backend):
        async def one(index):
            nonlocal running, most
            running += 1
            most = max(most, running)
            agent = Script((f"echo {1 if index % 2 else 0} > a.txt", SOLVE[1]))
            folder = tmp_path / f"trial_{index}"
            results.append((index, await run_trial(task, agent, backend, folder)))
            running -= 1

        await run_all(range(64), one, Gate(16, disk=tmp_path), 64)

    on_local(use)
    assert most == 16
    assert {r.outcome for i, r in results if i % 2} == {Outcome.solved}
    assert {r.outcome for i, r in results if not i % 2} == {Outcome.partial}
    assert len(results) == 64


def test_the_gate_waits_for_room_and_says_what_is_short():
    rooms = iter([Room(memory_mb=10, disk_mb=9), Room(memory_mb=500, disk_mb=9)])
    least = Room(memory_mb=100, disk_mb=5)
    order = []

    def free(disk):
        order.append("looked")
        return next(rooms)

    async def enter(gate):
        async with gate.place():
            order.append("entered")

    asyncio.run(enter(Gate(1, least=least, free=free)))
    assert order == ["looked", "looked", "entered"]
    full = Gate(1, least=least, patience_s=0, free=lambda disk: Room(memory_mb=500, disk_mb=1))
    with pytest.raises(UserError, match="for room: disk 1 MB of 5 MB free; free some"):
        asyncio.run(enter(full))
