"""The stages of a run, in order: which there are, what each reads and writes, what does its work.

    tasks init convert demonstrations sft (rejection-N sft-N)... critic ppo selection
    eval base, eval sft, eval ppo, mismatch, report

A stage whose section a config leaves out is not there. Each does what a command of its own does
with the same config; `t1jax run` only puts them in order.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from sandbox.commands import make_tasks
from t1jax.checkpoint.convert import convert
from t1jax.checkpoint.init_tiny import init_tiny
from t1jax.config import Config, RolloutSection, require
from t1jax.evaluation.report import report
from t1jax.evaluation.run import evaluate
from t1jax.pipeline.critic import critic
from t1jax.pipeline.learning import policy_path, policy_stages, sft_stage
from t1jax.pipeline.mismatch import FILE as MISMATCH
from t1jax.pipeline.mismatch import mismatch
from t1jax.pipeline.ppo import ppo
from t1jax.pipeline.rollout import rollout
from t1jax.pipeline.run_records import Stage
from t1jax.pipeline.selection import (
    FILE,
    candidate_steps,
    policy_of,
    select,
    selected,
    validation_name,
)
from t1jax.pipeline.sft import rejection_name, sft, sources

PLAYING = ("seed", "agent", "sampler", "sandbox.kind", "sandbox.verification", "model.dtype")
LEARNING = ("seed", *(f"model.{name}" for name in (
    "dtype", "parameters", "remat", "grouped_matmul", "dispatch")))  # fmt: skip
SEEDS_APART = 1000  # between rounds of rejection: each draws other tasks and tokens


def stages_of(config: Config) -> list[Stage]:
    """The stages of this config."""
    parts = (_tasks, _model, _fine_tuning, _training, _evaluations, _conclusions)
    found = [stage for part in parts for stage in part(config)]
    names = {stage.name for stage in found}
    return [
        dataclasses.replace(stage, after=tuple(n for n in stage.after if n in names))
        for stage in found
    ]


# ---- what is learned from ------------------------------------------------------------------------


def _tasks(config: Config) -> Iterator[Stage]:
    section = config.tasks
    if section is None or section.make is None:
        return
    folder, made = section.folder, section.make

    def work() -> None:
        if not Path(folder).exists():  # it appears whole
            make_tasks(
                folder, seed=made.seed, count=made.count, levels=made.levels,
                families=made.families,
            )  # fmt: skip

    yield Stage(
        name="tasks", command="t1jax tasks make", after=(), reads=("tasks.make",),
        writes=(Path(folder),), work=work,
    )  # fmt: skip


def _model(config: Config) -> Iterator[Stage]:
    if config.init is None:
        return
    section, checkpoint = config.init, Path(config.model.checkpoint)
    published = Path(config.run) / "published"

    def make() -> None:
        if not published.exists():
            init_tiny(published, seed=section.seed, size=section.size)

    def converted() -> None:
        if not checkpoint.exists():
            convert(published, checkpoint, verify=True)

    yield Stage(
        name="init", command="t1jax init-tiny", after=(), reads=("init",), writes=(published,),
        work=make,
    )  # fmt: skip
    yield Stage(
        name="convert", command="t1jax convert", after=("init",), reads=(), writes=(checkpoint,),
        work=converted,
    )  # fmt: skip


def plays_demonstrations(config: Config) -> bool:
    """Whether fine-tuning begins on what `t1jax rollout` of the same config writes."""
    return config.sft is not None and Path(sources(config, 0)[0]) == _trajectories(
        config, config.rollout.name
    )


def _fine_tuning(config: Config) -> Iterator[Stage]:
    if config.sft is None:
        return
    if plays_demonstrations(config):
        yield Stage(
            name="demonstrations", command="t1jax rollout", after=("tasks", "convert"),
            reads=(*PLAYING, "rollout", f"tasks.{config.rollout.split}"),
            writes=(_trajectories(config, config.rollout.name),), work=lambda: rollout(config),
        )  # fmt: skip
    yield _sft(config, 0, ("convert", "demonstrations"))
    for number in range(1, (config.rejection.rounds if config.rejection else 0) + 1):
        yield _sampling(config, number)
        before = (f"rejection-{n}" for n in range(1, number + 1))
        yield _sft(config, number, (sft_stage(number - 1), *before))


def _sft(config: Config, round: int, after: tuple[str, ...]) -> Stage:
    name = sft_stage(round)
    rejection = ("rejection.epochs", "rejection.optimizer") if round else ()
    return Stage(
        name=name, command=f"t1jax sft --round {round}" if round else "t1jax sft", after=after,
        reads=(*LEARNING, "sft", *rejection), writes=(_weights(config, name),),
        leaves_behind=_states(config, name), work=lambda: sft(config, round=round),
    )  # fmt: skip


def _sampling(config: Config, round: int) -> Stage:
    """Trials of the policy so far."""
    section, name = require(config, "rejection"), rejection_name(round)

    def work() -> None:
        asked = RolloutSection(
            name=name, policy="model", checkpoint=str(_weights(config, sft_stage(round - 1))),
            limit=section.limit, attempts=section.attempts, sampling=section.sampling,
        )  # fmt: skip
        seed = config.seed + SEEDS_APART * round
        rollout(config.model_copy(update={"rollout": asked, "seed": seed}))

    reads = ("rejection.limit", "rejection.attempts", "rejection.sampling", "tasks.train")
    return Stage(
        name=name, command="t1jax rollout", after=("tasks", sft_stage(round - 1)),
        reads=(*PLAYING, *reads), writes=(_trajectories(config, name),), work=work,
    )  # fmt: skip


def _training(config: Config) -> Iterator[Stage]:
    begins = _last_sft(config) or "convert"
    if config.critic is not None:
        yield Stage(
            name="critic", command="t1jax critic", after=("tasks", begins),
            reads=(*PLAYING, *LEARNING, "critic", "tasks.train",
                   "ppo.gamma", "ppo.lam", "ppo.sampling"),
            writes=(Path(config.run) / "checkpoints" / "critic",),
            leaves_behind=(_trajectories(config, "critic"),), work=lambda: critic(config),
        )  # fmt: skip
    if config.ppo is not None:
        yield Stage(
            name="ppo", command="t1jax ppo", after=("tasks", begins, "critic"),
            reads=(*PLAYING, *LEARNING, "ppo", "tasks.train"),
            writes=(_weights(config, "ppo"),),
            leaves_behind=(*_states(config, "ppo"), _trajectories(config, "ppo")),
            work=lambda: ppo(config),
        )  # fmt: skip
        yield _selection(config)


def _selection(config: Config) -> Stage:
    section = require(config, "ppo")
    steps = candidate_steps(section.steps, config.checkpoints, config.selection.candidates)
    behind = [_evaluation(config, validation_name(n)) for n in steps]
    return Stage(
        name="selection", command="t1jax eval", after=("tasks", "ppo"),
        reads=(*PLAYING, "selection", "evaluation.sampling", "tasks.validation",
               "checkpoints.every_steps"),
        writes=(Path(config.run) / FILE, *(policy_of(config, n) for n in steps)),
        leaves_behind=tuple(behind), work=lambda: select(config),
    )  # fmt: skip


# ---- what came of it -----------------------------------------------------------------------------


def _evaluations(config: Config) -> Iterator[Stage]:
    if config.tasks is None:
        return
    yield _test(config, "base", "convert", lambda: config.model.checkpoint)
    last = _last_sft(config)
    if last:
        yield _test(config, "sft", last, lambda: policy_path(config, "ppo"))
    if config.ppo is not None:
        yield _test(config, "ppo", "selection", lambda: selected(config))


def _test(config: Config, name: str, after: str, checkpoint: Callable[[], str]) -> Stage:
    """A checkpoint on the test split."""

    def work() -> None:
        changes = {"name": name, "checkpoint": checkpoint(), "split": "test", "endpoint": "",
                   "attempts": config.test.attempts, "limit": config.test.limit}  # fmt: skip
        section = config.evaluation.model_copy(update=changes)
        evaluate(config.model_copy(update={"evaluation": section}))

    return Stage(
        name=f"eval {name}", command="t1jax eval", after=("tasks", after),
        reads=(*PLAYING, "test", "evaluation.sampling", "tasks.test"),
        writes=(_evaluation(config, name),), work=work,
    )  # fmt: skip


def _conclusions(config: Config) -> Iterator[Stage]:
    run = Path(config.run)

    def measure() -> None:
        mismatch(
            config.run, after=selected(config), limit=config.mismatch.limit, seed=config.seed,
            batch_tokens=config.mismatch.batch_tokens,
        )  # fmt: skip

    if config.ppo is not None:
        yield Stage(
            name="mismatch", command="t1jax mismatch", after=("ppo", "selection"),
            reads=("seed", "mismatch"), writes=(run / MISMATCH,), work=measure,
        )  # fmt: skip

    def tell() -> None:
        report(run)

    told = ("eval base", "eval sft", "eval ppo", "mismatch", *policy_stages(config), "critic")
    yield Stage(
        name="report", command="t1jax report", after=told, reads=(), writes=(run / "report",),
        work=tell,
    )  # fmt: skip


# ---- places --------------------------------------------------------------------------------------


def _last_sft(config: Config) -> str:
    """The last stage of fine-tuning; empty where there is none."""
    return policy_stages(config)[-2] if config.sft is not None else ""


def _trajectories(config: Config, name: str) -> Path:
    return Path(config.run) / "trajectories" / name


def _weights(config: Config, name: str) -> Path:
    return Path(config.run) / "weights" / name


def _evaluation(config: Config, name: str) -> Path:
    return Path(config.run) / "evaluation" / name


def _states(config: Config, name: str) -> tuple[Path, ...]:
    """Of a learning stage."""
    return tuple(Path(config.run) / part / name for part in ("checkpoints", "tensorboard", "dumps"))
