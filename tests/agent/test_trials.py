"""Episodes as trials in real sandboxes: outcome and reward in the record, faults, cancelling."""

import asyncio
import json

import numpy as np
import pytest

from sandbox import task as tasks
from sandbox.base import InfraError, make_backend
from sandbox.task import TaskError
from sandbox.trial import TrialConfig
from sandbox.verify import Baseline, Outcome
from t1jax.agent.conversation import Policy
from t1jax.agent.episode import EpisodeConfig, run_episode
from t1jax.agent.scripted import Scripted, commands_of, solution, solution_turns
from t1jax.errors import UserError
from t1jax.trajectory.io import load_trajectory, recover

from .conftest import LIMITS, SUBMIT, bash

FILES = {
    "task.toml": '[task]\nname = "demo/two"\n[verifier]\nenvironment_mode = "separate"\n'
    '[environment]\nnetwork_mode = "no-network"\nstorage_mb = 32\n[environment.local]\n',
    "instruction.md": "Write 1 to a.txt and 2 to b.txt.",
    "environment/files/given.txt": "given\n",
    "solution/solve.sh": "#!/bin/bash\ncd /app\necho 1 > a.txt\necho 2 > b.txt\n",
    "tests/test.sh": '#!/bin/bash\ncd /app\na=0; b=0\n[ "$(cat a.txt)" = 1 ] && a=1\n'
    '[ "$(cat b.txt)" = 2 ] && b=1\n'
    'echo "{\\"a\\": $a, \\"b\\": $b}" > /logs/verifier/reward.json\n',
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return tasks.load(root)


def episode(task, complete, chat, folder, *, baseline=None, limits=LIMITS, **config):
    """One trial on the local back end."""
    settings = EpisodeConfig(**({"limits": limits, "trial": TrialConfig()} | config))

    async def main():
        backend = make_backend("local")
        try:
            policy = Policy(complete=complete, chat=chat)
            return await run_episode(task, backend, policy, folder, settings, baseline=baseline)
        finally:
            await backend.close()

    return asyncio.run(main())


def says(chat, *turns):
    return Scripted(chat, turns, thinking=False)


def test_a_solution_said_as_turns_is_a_solved_trajectory(task, chat, tmp_path):
    script = says(chat, *solution_turns(task))
    details = {"attempt": 3}
    done = episode(task, script, chat, tmp_path / "trial", details=details, session="s")
    saved = load_trajectory(tmp_path / "trial/trajectory")
    ending, (chunk,) = saved.ending, saved.chunks
    assert (ending.task, ending.outcome, ending.reward) == ("demo/two", "solved", 1.0)
    assert ending.details["rewards"]["binary"] == 1.0 and ending.details["attempt"] == 3
    assert (ending.details["passed"], ending.details["total"]) == (2, 2)
    assert ending.timings["agent"] > 0 and ending.timings["policy"] >= 0
    written = [chat.parse(chunk.ids[t.sampled : t.end], thinking=False) for t in chunk.turns]
    commands = [turn.calls[0].arguments.get("command") for turn in written]
    assert commands == ["echo 1 > a.txt", "echo 2 > b.txt", None]
    assert chunk.mask.sum() == sum(t.end - t.sampled for t in chunk.turns)
    assert not chunk.recorded.any() and (chunk.logprobs == 0).all()
    assert done.result.commands == 2
    assert json.loads((tmp_path / "trial/result.json").read_text())["outcome"] == "solved"


@pytest.mark.parametrize(
    ("turns", "changes", "outcome", "reward"),
    [
        ([bash("echo 1 > a.txt"), SUBMIT], {}, "partial", 0.5),
        ([bash("echo 1 > a.txt"), bash("true")], {"turns": 2}, "turns_exhausted", 0.5),
        ([bash("echo 1 > a.txt; seq 9999")], {"context_tokens": 600}, "context_full", 0.5),
        ([bash("echo 1 > a.txt"), bash("sleep 99")], {"seconds": 1.0}, "agent_timeout", 0.5),
    ],
)
def test_an_episode_that_is_cut_short_is_verified_all_the_same(
    task, chat, tmp_path, turns, changes, outcome, reward
):
    limits = LIMITS.model_copy(update={"list_tools": False, **changes})
    done = episode(task, says(chat, *turns), chat, tmp_path / "trial", limits=limits)
    assert (done.trajectory.ending.outcome, done.trajectory.reward) == (outcome, reward)


def test_the_reward_is_of_the_kind_that_was_asked_for(task, chat, tmp_path):
    script = says(chat, bash("echo 1 > a.txt"), SUBMIT)
    baseline = Baseline(oracle_passed=frozenset("ab"), nop_passed=frozenset("b"))
    done = episode(task, script, chat, tmp_path / "1", reward="gained", baseline=baseline)
    assert done.trajectory.reward == 0.0
    assert done.trajectory.ending.details["rewards"] == {
        "assertions": 0.05, "fraction": 0.5, "fraction_bonus": 0.5, "binary": 0.0, "gained": 0.0
    }  # fmt: skip
    with pytest.raises(UserError, match="audit the task"):
        episode(task, script, chat, tmp_path / "2", reward="gained")
    with pytest.raises(UserError, match="reward is 'ratio'; expected one of assertions"):
        episode(task, script, chat, tmp_path / "3", reward="ratio")


class Broken:
    """Fails in some turns, as an engine that lost its machine."""

    def __init__(self, script, failing):
        self.script, self.failing, self.asked = script, failing, 0

    async def __call__(self, request):
        self.asked += 1
        if self.asked in self.failing:
            raise InfraError("the engine is gone")
        return await self.script(request)


def test_an_engine_that_fails_once_costs_an_attempt_and_leaves_one_record(task, chat, tmp_path):
    engine = Broken(says(chat, *solution_turns(task)), {2})
    done = episode(task, engine, chat, tmp_path / "trial")
    assert (done.result.outcome, done.result.attempts) == (Outcome.solved, 2)
    assert len(done.trajectory.chunks[0].turns) == 3


def test_an_engine_that_stays_broken_is_no_reward_of_0(task, chat, tmp_path):
    engine = Broken(says(chat, *solution_turns(task)), {2, 4})
    done = episode(task, engine, chat, tmp_path / "trial")
    assert done.result.outcome is Outcome.infra_error
    assert done.trajectory.reward is None and "rewards" not in done.trajectory.ending.details


def test_cancelling_keeps_what_was_written_and_removes_the_sandbox(task, chat, tmp_path):
    script = says(chat, bash("echo 1 > a.txt"), SUBMIT)
    waits = asyncio.Event()

    async def complete(request):
        if len(waits_for) == 1:
            waits.set()
            await asyncio.Event().wait()
        waits_for.append(request)
        return await script(request)

    waits_for = []

    async def main():
        backend = make_backend("local")
        policy = Policy(complete=complete, chat=chat)
        config = EpisodeConfig(limits=LIMITS, trial=TrialConfig())
        folder = tmp_path / "trial"
        trial = asyncio.ensure_future(run_episode(task, backend, policy, folder, config))
        await asyncio.wait_for(waits.wait(), 30)
        trial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trial
        await backend.close()

    asyncio.run(main())
    assert json.loads((tmp_path / "trial/result.json").read_text())["outcome"] == "cancelled"
    with pytest.raises(UserError, match="incomplete"):
        load_trajectory(tmp_path / "trial/trajectory")
    recorder = recover(tmp_path / "trial/trajectory.incomplete")
    prompt = waits_for[0].prompt
    np.testing.assert_array_equal(recorder.stream[: len(prompt)], prompt)
    assert len(recorder) > len(prompt)


def test_a_script_is_cut_where_bash_has_read_a_whole_command():
    script = """\
#!/bin/bash
# a comment

echo one \\
  two
for x in 1 2; do
  # inside
  echo $x
done
cat > a.txt <<'END'
echo "
END
echo 'a
b'
f() { echo; }
"""
    assert commands_of(script.splitlines(), "solve.sh") == [
        "echo one \\\n  two",
        "for x in 1 2; do\n  # inside\n  echo $x\ndone",
        "cat > a.txt <<'END'\necho \"\nEND",
        "echo 'a\nb'",
        "f() { echo; }",
    ]
    with pytest.raises(TaskError, match=r"solve.sh: bash cannot read the end of it: 'if true"):
        commands_of(["true", "if true; then"], "solve.sh")


def test_a_solution_that_needs_more_than_commands_is_refused(task, tmp_path):
    assert solution(task) == ["echo 1 > a.txt", "echo 2 > b.txt"]
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "solution/patch.diff").write_text("")
    with pytest.raises(TaskError, match=r"needs patch.diff besides solve.sh"):
        solution(tasks.load(tmp_path))
    (tmp_path / "solution/patch.diff").unlink()
    (tmp_path / "solution/solve.sh").write_text("cd /app\n")
    with pytest.raises(TaskError, match="has no command"):
        solution(tasks.load(tmp_path))
