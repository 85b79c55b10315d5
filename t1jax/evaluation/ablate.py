"""`t1jax ablate CONFIG OVERLAY...`: PPO as the config says and as each overlay does, several seeds.

    RUN/ablations/NAME/seed-N       a run of its own: PPO, then the validation split
    RUN/ablations/ablations.json    every number; ablations.md: the table

All begin at the weights that fine-tuning left in the config's run, and at its warmed critic unless
the overlay takes the critic away; the config itself is the variant `full`. A run that was ended
goes on, and finished ones are kept, by the same records as `t1jax run`. The test split has no part
in it; nor is a checkpoint chosen: the last weights of each are evaluated.
"""

import dataclasses
import json
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from sandbox.base import make_backend
from t1jax.config import Config, EvaluationSection, load_config, require
from t1jax.data.tasks import task_folders
from t1jax.errors import Preempted, UserError
from t1jax.evaluation.ablation_table import Trained, numbers_of, tabulate
from t1jax.evaluation.run import evaluate
from t1jax.evaluation.run_folder import read_run
from t1jax.interrupts import Interrupted
from t1jax.pipeline.learning import (
    keep_config,
    leaves,
    may_change,
    policy_path,
    policy_stages,
)
from t1jax.pipeline.policy import identity
from t1jax.pipeline.ppo import ppo
from t1jax.pipeline.run_records import FOLDER, Records, Stage, alone_in
from t1jax.pipeline.run_view import View
from t1jax.pipeline.trials import keep_settings

MAY_DIFFER = ("ppo", "critic")  # what is before PPO is shared
SHARED = ("init", "model", "tasks", "sft", "rejection", "critic")  # what the run was made by
FULL = "full"  # the name of the config itself
VALIDATION = "validation"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """The config, or an overlay of it."""

    name: str
    config: Config
    changes: dict[str, tuple[Any, Any]]  # by key: in the config itself, and here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A stage of one variant's run under one seed."""

    name: str
    stage: Stage
    records: Records


def ablate(
    config: str, overlays: Sequence[str], *, seeds: int, changes: Sequence[str] = ()
) -> Path:
    """Trains and evaluates what is missing, and writes the table.

    Args:
      config: whose run has come to PPO.
      overlays: configs whose base it is.
      seeds: of each variant, from the config's own on.
      changes: as `--set`, to all of them.

    Returns: the table.

    Raises:
      UserError: an overlay changes what is shared, the run does not hold what all begin at, or a
        run of an ablation was made by another config; before any work.
      Preempted: a signal came; the same command goes on.
    """
    variants = read_variants(config, overlays, changes)
    base = variants[0].config
    folder = Path(base.run) / "ablations"
    runs = {
        (variant.name, seed): run_of(base, variant, seed)
        for variant in variants
        for seed in range(base.seed, base.seed + seeds)
    }
    check_run(base, runs.values())
    with alone_in(folder):
        keep_settings(folder, identity(shared_weights(base)))
        jobs = [job for key, each in runs.items() for job in _jobs(key, each)]
        for each in runs.values():
            keep_config(each)
        work_through(jobs)
    trained = [_trained(variant, runs) for variant in variants]
    return tabulate(folder, trained)


def read_variants(config: str, overlays: Sequence[str], changes: Sequence[str]) -> list[Variant]:
    """The config itself, then the overlays.

    Raises:
      UserError: names the key in which an overlay changes what all of them share.
    """
    base = load_config(config, changes)
    require(base, "ppo")
    found = [Variant(name=FULL, config=base, changes={})]
    before = leaves(base.model_dump(mode="json"))
    for file in overlays:
        changed = load_config(file, changes)
        now = leaves(changed.model_dump(mode="json"))
        keys = sorted(k for k in {*before, *now} if before.get(k) != now.get(k))
        other = [k for k in keys if k.split(".")[0] not in MAY_DIFFER]
        if other:
            raise UserError(
                f"{file}: {other[0]}={now.get(other[0])!r}, and {config} has "
                f"{before.get(other[0])!r}: an ablation shares all that is before PPO, and differs "
                f"in {' and '.join(MAY_DIFFER)} alone. Begin the overlay with `base:` and the path "
                f"of {config}"
            )
        if not keys:
            raise UserError(f"{file} changes nothing of {config}; expected an overlay")
        told = {k: (before.get(k), now.get(k)) for k in keys if k.startswith("ppo.")}
        if changed.critic is None and base.critic is not None:
            told["critic"] = ("warmed", None)
        name = Path(file).stem
        if name in {variant.name for variant in found}:
            raise UserError(f"{file}: there is another {name!r}; overlays need names of their own")
        found.append(Variant(name=name, config=changed, changes=told))
    return found


def run_of(base: Config, variant: Variant, seed: int) -> Config:
    """One run: PPO of the variant from the shared weights."""
    section = require(variant.config, "ppo")
    warmed = variant.config.critic is not None and section.baseline == "critic"
    tasks = require(base, "tasks").model_copy(update={"make": None})
    changes = {
        "run": str(Path(base.run) / "ablations" / variant.name / f"seed-{seed}"),
        "seed": seed,
        "init": None,
        "model": base.model.model_copy(update={"checkpoint": shared_weights(base)}),
        "tasks": tasks,
        "sft": None,
        "rejection": None,
        "critic": None,
        "ppo": section.model_copy(update={"warm_critic": base.run if warmed else ""}),
    }
    return variant.config.model_copy(update=changes)


def shared_weights(base: Config) -> str:
    """What fine-tuning ended with; where the config has none, the model's checkpoint.

    Raises:
      UserError: fine-tuning has not ended.
    """
    if base.sft is None:
        return base.model.checkpoint
    *_, last, _ = policy_stages(base)
    weights = Path(base.run) / "weights" / last
    if not (weights / "manifest.json").is_file():
        raise UserError(
            f"{base.run} holds no fine-tuned weights ({weights}), which ablations begin at; make "
            "them with `t1jax run` (or `t1jax sft` and `t1jax critic`) first"
        )
    return str(weights)


def check_run(base: Config, runs: Iterable[Config]) -> None:
    """Refuses what would fail, or mislead, in the middle.

    Raises:
      UserError: the config's run was made by another config, or lacks its critic; there are no
        tasks, or no sandboxes.
    """
    file = Path(base.run) / "config.yaml"
    made = leaves(load_config(file).model_dump(mode="json"))
    now = leaves(base.model_dump(mode="json"))
    for key in sorted({*made, *now}):
        same = key.split(".")[0] not in SHARED or may_change(key)
        if not same and made.get(key) != now.get(key):
            raise UserError(
                f"{key}={now.get(key)!r}, and {file} says {made.get(key)!r}: what ablations begin "
                "at was made by that; change it back, or give the config of that run"
            )
    if any(require(run, "ppo").warm_critic for run in runs) and not _has_critic(Path(base.run)):
        raise UserError(
            f"{base.run} holds no critic whose warm-up has ended, which ablations begin at; make "
            "it with `t1jax run` (or `t1jax critic`) first, or leave `critic:` out of the config"
        )
    section = require(base, "tasks")
    for split in (section.train, section.validation):
        task_folders(section.folder, split)
    make_backend(base.sandbox.kind, endpoints=base.sandbox.endpoints)  # its programs are there


def _has_critic(run: Path) -> bool:
    """A saved state; where `t1jax run` makes it, of a stage that has ended."""
    states = (run / "checkpoints" / "critic").glob("*")
    begun, ended = (run / FOLDER / f"critic.{suffix}" for suffix in ("begun", "json"))
    whole = ended.is_file() or not begun.exists()
    return whole and any(state.name.isdigit() for state in states)


def _jobs(key: tuple[str, int], config: Config) -> list[Job]:
    stages = [
        _stage(config, "ppo", Path("weights", "ppo"), (), lambda: ppo(config)),
        _stage(config, VALIDATION, Path("evaluation", VALIDATION), ("ppo",),
               lambda: _validate(config)),
    ]  # fmt: skip
    records = Records(config, stages)
    records.check()
    name, seed = key
    return [Job(name=f"{name}, seed {seed}: {s.name}", stage=s, records=records) for s in stages]


def _stage(
    config: Config, name: str, writes: Path, after: tuple[str, ...], work: Callable[[], None]
) -> Stage:
    reads = {"ppo": ("seed", "ppo", "agent", "sampler", "model", "tasks.train"),
             VALIDATION: ("selection", "evaluation.sampling", "tasks.validation")}  # fmt: skip
    return Stage(
        name=name, command="t1jax ablate", after=after, reads=reads[name],
        writes=(Path(config.run) / writes,), work=work,
    )  # fmt: skip


def _validate(config: Config) -> None:
    asked = config.selection
    section = EvaluationSection(
        name=VALIDATION, checkpoint=policy_path(config), split="validation",
        attempts=asked.attempts, limit=asked.limit, sampling=config.evaluation.sampling,
    )  # fmt: skip
    evaluate(config.model_copy(update={"evaluation": section}))


def work_through(jobs: Sequence[Job]) -> None:
    """Does what is not done, in one view."""
    done = {job.name: job.records.seconds(job.stage) for job in jobs
            if job.records.finished(job.stage)}  # fmt: skip
    with View([job.name for job in jobs], done) as view:
        for job in jobs:
            if job.name in done:
                continue
            try:
                with view.running(job.name), job.records.doing(job.stage):
                    job.stage.work()
                jax.clear_caches()  # the next run compiles its own: 0.25 GB each stayed otherwise
            except (Interrupted, Preempted) as ended:
                if ended.number == signal.SIGINT:
                    raise Interrupted(ended.number) from None
                raise Preempted(
                    f"a signal ended the ablations at {job.name}: run the same command again to "
                    "go on"
                ) from None


def _trained(variant: Variant, runs: dict[tuple[str, int], Config]) -> Trained:
    told = {
        seed: numbers_of(read_run(config.run), VALIDATION)
        for (name, seed), config in runs.items()
        if name == variant.name
    }
    changes = {key: json.loads(json.dumps(pair)) for key, pair in variant.changes.items()}
    return Trained(name=variant.name, changes=changes, by_seed=told)
