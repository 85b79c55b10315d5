"""Run folders made up for tests, through the code that writes real ones."""

import json
from pathlib import Path

import numpy as np

from t1jax.agent.episode import Usage
from t1jax.config import parse_config, to_yaml
from t1jax.evaluation.results import RESULTS, SUMMARY, write_results
from t1jax.evaluation.summary import summarize
from t1jax.pipeline.metrics import Metrics
from t1jax.pipeline.trials import PLAYED, Played, write_json
from t1jax.trajectory.io import save_trajectory
from t1jax.trajectory.record import Ending, Finish, RouteShape
from t1jax.trajectory.recorder import Recorder

SHAPE = RouteShape(layers=8, chosen=4, experts=16)
FAMILIES = ("archives", "count", "edit", "find", "git")
ABILITY = {"base": -6.0, "sft": -0.4, "ppo": 1.2}  # a task's chance is a logistic of this
LONG = "t1jax/archives-1-000000"  # prints a line of a megabyte
HOSTILE = (
    "\x1b[31mred\x1b[0m\x07\x00 <script>document.title='owned'</script></pre></html>"
    "<img src=http://127.0.0.1:9/x onerror=alert(1)> & \u202egnp.exe \ufffd \x9b2J\r\n"
)


def make_run(folder: Path, chat, *, steps: int = 30, tasks: int = 200, attempts: int = 3, seed=0):
    """A whole run that learned: metrics, evaluations with trajectories, mismatch, stages."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    chat.tokenizer.save(str(folder / "tokenizer.json"))
    write_config(folder)
    write_training(folder, random, steps)
    for name in ABILITY:
        write_evaluation(folder / "evaluation" / name, name, chat, tasks, attempts, seed)
    write_mismatch(folder)
    stages = {"tasks": 2.1, "eval base": 41.0, "demonstrations": 63.2, "sft": 152.4,
              "eval sft": 55.0, "critic": 61.0, "ppo": 611.5, "eval ppo": 58.3}  # fmt: skip
    lines = [{"stage": n, "seconds": s, "began": 0.0, "ended": s} for n, s in stages.items()]
    (folder / "stages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_config(folder: Path, **changes):
    optimizer = {"learning_rate": 1e-4}
    tree = {"run": str(folder), "model": {"checkpoint": str(folder)},
            "ppo": {"steps": 30, "actor": optimizer, "critic": optimizer, **changes}}  # fmt: skip
    (folder / "config.yaml").write_text(to_yaml(parse_config(tree, "test")))


def write_training(folder: Path, random, steps: int):
    with Metrics(folder, "sft", start=0, steps=20, shown=()) as metrics:
        for step in range(20):
            metrics.write(step, {"loss": 0.4 + 3 * np.exp(-step / 4) + random.normal(0, 0.03)})
    with Metrics(folder, "critic", start=0, steps=4, shown=()) as metrics:
        for step in range(4):
            share = float("nan") if step == 0 else 0.1 + 0.08 * step
            metrics.write(step, {"explained_variance": share, "value_loss": 0.1})
    with Metrics(folder, "ppo", start=0, steps=steps, shown=()) as metrics:
        for step in range(steps):
            metrics.write(step, ppo_row(step, random))


def ppo_row(step: int, random) -> dict:
    """Numbers by the names that training writes."""
    mean = 0.75 - 0.4 * np.exp(-step / 9) + random.normal(0, 0.02)
    chances = np.array([mean * 0.8, 0.25 * (1 - mean), 0.75 * (1 - mean) + 0.1 * mean, 0.1 * mean])
    counts = random.multinomial(64, chances / chances.sum())
    names = ("solved", "partial", "failed", "turns_exhausted")
    gap = 2.6e-7 * np.exp(random.normal(0, 0.15))
    seconds = {"rollout": 8 + random.normal(0, 0.6), "critic": 4.1, "actor": 5.2, "publish": 0.1,
               "values_and_logprobs": 2.2, "pack": 0.02}  # fmt: skip
    layers = 0.002 * np.arange(1, SHAPE.layers + 1) * (1 + 0.2 * random.random(SHAPE.layers))
    return {
        "reward/mean": mean, "reward/low": mean - 0.09, "reward/high": mean + 0.09,
        "success": counts[0] / 64, "trajectories": 64.0,
        **{f"outcome/{n}": float(c) for n, c in zip(names, counts, strict=True) if c},
        "explained_variance": 0.65 - 0.4 * np.exp(-step / 6) + random.normal(0, 0.03),
        "approximate_kl": 2e-4 * np.exp(random.normal(0, 0.3)),
        "mismatch/train_rollout_logprob_abs_diff": gap, "mismatch/max": 12 * gap,
        "mismatch/k3": gap**2 / 2, "mismatch/ESS": 0.99999,
        "replay_replace_rate_by_layer": layers.tolist(),
        "seconds": sum(seconds.values()),
        **{f"seconds/{name}": value for name, value in seconds.items()},
    }  # fmt: skip


def write_mismatch(folder: Path):
    gaps = {"tito_replay": 2.7e-7, "tito_live": 8.1e-4, "retokenised_replay": 2.2e-3,
            "retokenised_live": 2.9e-3}  # fmt: skip
    cells = {
        name: {"abs_diff": gap, "ci95": [gap * 0.8, gap * 1.25], "trajectories": 64, "tokens": 8192}
        for name, gap in gaps.items()
    }
    parts = {"engine": cells["tito_replay"], "routing": cells["tito_live"]}
    write_json(folder / "mismatch.json", cells | {"parts": parts, "movement": cells["tito_live"]})


def write_evaluation(folder: Path, name: str, chat, tasks: int, attempts: int, seed: int):
    """Results of every trial; a trajectory of the first few of each kind."""
    random = np.random.default_rng((seed, tasks))  # every evaluation meets the same tasks
    hardness = random.normal(0, 1.5, tasks)
    dice = np.random.default_rng((seed, len(name), sum(map(ord, name))))
    results, kept = [], {}
    for task in range(tasks):
        for attempt in range(attempts):
            chance = 1 / (1 + np.exp(hardness[task] - ABILITY[name]))
            played = trial(task, attempt, bool(dice.random() < chance), dice)
            results.append(played)
            kind = "none" if played.fraction is None else f"{played.fraction:.0f}{played.solved}"
            kept[kind] = kept.get(kind, 0) + 1
            if kept[kind] <= 2 and played.graded:
                write_trial(folder, played, chat, name == "ppo" and played.task == LONG)
    folder.mkdir(parents=True, exist_ok=True)
    write_results(folder / RESULTS, results)
    numbers = summarize(results, attempts=attempts, seed=0)
    facts = {"split": "test", "checkpoint": name, "manifest_sha256": name}
    write_json(folder / SUMMARY, facts | numbers)


def trial(task: int, attempt: int, solved: bool, random) -> Played:
    """One in a hundred is broken by infrastructure; a third of the failures is partial."""
    broken, passed = random.random() < 0.01, 3 if solved else int(random.random() < 0.33)
    outcome = "solved" if solved else "partial" if passed else str(
        random.choice(["failed", "turns_exhausted"]))  # fmt: skip
    return Played(
        task=f"t1jax/{FAMILIES[task % 5]}-1-{task:06d}", attempt=attempt, seed=task, version=0,
        category=FAMILIES[task % 5], difficulty=str(1 + task % 2),
        outcome="infra_error" if broken else outcome, solved=None if broken else solved,
        fraction=None if broken else passed / 3, gained=None, passed=None if broken else passed,
        total=None if broken else 3, usage=Usage(turns=2, tokens=200, sampled_tokens=80),
        commands=2, seconds={"agent": 3.0}, flags=[], error="gone" if broken else "",
    )  # fmt: skip


def write_trial(folder: Path, played: Played, chat, long: bool):
    where = folder / f"{played.task.split('/')[1]}__{played.attempt}"
    where.mkdir(parents=True)
    write_json(where / PLAYED, played.to_json())
    recorder = Recorder(SHAPE)
    random = np.random.default_rng(played.seed)
    task = f"Write the number of lines of /app/log.txt into /app/answer.txt (task {played.task})."
    recorder.append_context(chat.opening([{"role": "user", "content": task}]))
    say(
        recorder,
        chat,
        "I count the lines first.\n<tool_call>wc -l /app/log.txt</tool_call>",
        random,
    )
    output = HOSTILE + "a line of one megabyte, " * 42_000 if long else HOSTILE
    last = int(recorder.stream[-1])
    recorder.append_context(chat.following([{"role": "tool", "content": output}], last=last))
    say(recorder, chat, "Café ✓ 🙂 <script>alert('x')</script> echo 412 > /app/answer.txt", random)
    ending = Ending(task=played.task, outcome=played.outcome, reward=played.fraction)
    save_trajectory(recorder.finish(ending), where / "trajectory")


def say(recorder: Recorder, chat, text: str, random):
    """Samples a text, and records the routes of all that was read since."""
    first = max(len(recorder) - 1, 0)
    ids = np.append(chat.encode_text(text), chat.tokenizer.token_to_id("<|im_end|>"))
    logprobs = -random.gamma(0.4, 1.2, len(ids))
    recorder.append_sampled(ids, logprobs, version=0, finish=Finish.stop)
    # Skewed, so that some experts are busier; a step of 3 meets no expert of 16 twice.
    rows = (len(recorder) - 1 - first, SHAPE.layers, 1)
    begin = (SHAPE.experts * random.random(rows) ** 1.6).astype(int)
    chosen = (begin + 3 * np.arange(SHAPE.chosen)) % SHAPE.experts
    recorder.record_routes(first, chosen.astype(SHAPE.dtype))
