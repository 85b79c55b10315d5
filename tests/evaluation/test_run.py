"""`t1jax eval` over real sandboxes with a server that knows the answers."""

import contextlib
import io
import json
import re

import pytest

from sandbox import task as tasks
from sandbox.tasks.make import make
from t1jax.agent.episode import Usage
from t1jax.agent.scripted import solution
from t1jax.config import parse_config
from t1jax.errors import UserError
from t1jax.evaluation.results import read_results
from t1jax.evaluation.run import evaluate, evaluation_folder
from t1jax.evaluation.summary import headline_of, summarize
from t1jax.pipeline.trials import Played

from .conftest import call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twenty tasks, two of them to validate and two to test."""
    out = tmp_path_factory.mktemp("made") / "tasks"
    make(out, seed=0, count=20, levels=(1,), families=("edit", "count"))
    return out


@pytest.fixture(scope="module")
def answers(folder):
    found = map(tasks.load, folder.glob("*/*"))
    return {task.instruction: solution(task) for task in found}


@pytest.fixture
def config(folder, tmp_path):
    def make_config(**evaluation):
        tree = {
            "run": str(tmp_path / "run"),
            "model": {"checkpoint": "none"},
            "tasks": {"folder": str(folder)},
            "agent": {"turns": 4},
            "sandbox": {"jobs": 2, "attempts": 1},
            "evaluation": {
                "endpoint_model": "other",
                "sampling": {"temperature": 0.1},
                "attempts": 2,
                **evaluation,
            },
        }
        return parse_config(tree, "test")

    return make_config


def solver(answers, *, broken=(), lazy=()):
    """Says a task's solution, command by command, then submits."""

    def answer(body):
        _, instruction, *rest = [{"content": ""}, *body["messages"]]
        said = sum(message["role"] == "assistant" for message in rest)
        commands = answers[instruction["content"]]
        if instruction["content"] in broken:
            return 500, b"down"
        if said == len(commands) or instruction["content"] in lazy:
            return call("submit", {})
        return call("bash", {"command": commands[said]})

    return answer


def run(config):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        summary = evaluate(config)
    return summary, shown.getvalue()


def test_an_evaluation_is_complete_resumes_and_is_read_back(config, serve, folder, answers):
    lazy = tasks.load(min((folder / "validation").iterdir())).instruction
    server = serve(solver(answers, lazy=(lazy,)))
    evaluated = config(endpoint=server.url)
    summary, shown = run(evaluated)
    assert (summary["pass_at_1"], summary["tasks"], summary["attempts"]) == (0.5, 2, 2)
    assert (summary["infra_failures"], summary["refused"]) == (0, "")
    assert summary["outcomes"] == {"failed": 2, "solved": 2}
    assert summary["observed"]["pass_at_k"]["2"]["value"] == 0.5
    assert set(summary["observed"]["by_category"]) == {"count", "edit"}
    assert summary["turns"]["mean"] > 1 and summary["seconds"]["total"] > 0
    assert re.search(r"all +│ +2 │ +50.0% │", shown) and "outcomes of 4 trials" in shown
    where = evaluation_folder(evaluated)
    assert json.loads((where / "summary.json").read_text()) == summary
    lines = read_results(where)
    assert [(line.task, line.attempt) for line in lines] == sorted(
        (line.task, line.attempt) for line in lines
    )
    conversation = json.loads(next(where.glob("*/conversation.json")).read_text())
    assert conversation[0]["role"] == "user"
    before = len(server.requests)
    again, _ = run(evaluated)
    assert again == summary and len(server.requests) == before
    more, _ = run(config(endpoint=server.url, attempts=3))
    assert more["trials"] == 6 and len(server.requests) > before
    with pytest.raises(UserError, match="trials with endpoint_model = 'other', and now it is 'x'"):
        evaluate(config(endpoint=server.url, endpoint_model="x"))


def test_broken_trials_are_shown_and_refuse_the_headline(config, serve, folder, answers):
    broken = tasks.load(min((folder / "test").iterdir())).instruction
    down = config(endpoint=serve(solver(answers, broken=(broken,))).url, split="test", attempts=1)
    with pytest.raises(UserError, match=r"no headline: 1 of 2 trials are infrastructure failures"):
        run(down)
    where = evaluation_folder(down)
    summary = json.loads((where / "summary.json").read_text())
    assert (summary["pass_at_1"], summary["ci95"], summary["infra_failures"]) == (None, None, 1)
    assert summary["observed"]["pass_at_1"]["value"] == 1.0
    assert "status 500" in summary["errors"][0][0] and len(summary["tasks_missing"]) == 1
    assert [line.graded for line in read_results(where)] == [False, True]


def test_an_endpoint_needs_a_model_and_a_folder_needs_to_be_finished(config):
    with pytest.raises(UserError, match=r"evaluation.endpoint_model is empty"):
        evaluate(config(endpoint="http://127.0.0.1:1/v1", endpoint_model=""))
    with pytest.raises(UserError, match="expected a finished evaluation"):
        read_results(evaluation_folder(config()))


# ---- what is said of results ---------------------------------------------------------------------


def line(task, solved, **facts):
    graded = solved is not None
    return Played(
        **{
            "task": task, "attempt": 0, "seed": 0, "version": 0, "category": "a",
            "difficulty": "1", "outcome": "solved" if solved else "failed" if graded else
            "infra_error", "solved": solved, "fraction": float(solved) if graded else None,
            "gained": None, "passed": None, "total": None, "usage": Usage(), "commands": 0,
            "seconds": {}, "flags": [], "error": "" if graded else "gone", **facts,
        }
    )  # fmt: skip


@pytest.mark.parametrize(("broken", "refused"), [(0, False), (10, False), (11, True)])
def test_a_headline_bears_a_tenth_of_infrastructure_failures(broken, refused):
    results = [line(f"t{n}", True) for n in range(89)]
    results += [line("t0", False) for _ in range(11 - broken)]
    results += [line(f"t{n}", None) for n in range(broken)]
    headline = headline_of(results, seed=0)
    assert bool(headline.refused) == refused
    # Left out, not counted as failures.
    solved_of_t0 = 1 / (12 - broken)
    assert headline.estimate.value == pytest.approx((88 + solved_of_t0) / 89)


def test_a_task_without_a_graded_attempt_refuses_the_headline():
    results = [line(f"t{n}", True) for n in range(99)] + [line("gone", None)]
    headline = headline_of(results, seed=0)
    assert headline.refused == "1 tasks have no graded attempt, such as gone"


def test_a_summary_of_nothing_graded_has_no_numbers():
    summary = summarize([line("t", None)], attempts=1, seed=0)
    assert summary["pass_at_1"] is None and summary["mean_fraction"]["value"] is None
    assert summary["turns"] == {"mean": None, "median": None, "p90": None, "total": 0}


def test_an_agent_that_was_cut_short_after_the_work_was_done_solved_the_task():
    results = [line("t", True, outcome="turns_exhausted"), line("u", False)]
    assert summarize(results, attempts=1, seed=0)["pass_at_1"] == 0.5
