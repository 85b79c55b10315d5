"""`t1jax sft`: supervised fine-tuning on the sampled tokens of kept trajectories.

    trajectories -> kept ones -> batches -> steps -> RUN/weights/sft

and, after a round N of rejection sampling, on those that it solved as well -> RUN/weights/sft-N.

One optimizer step a batch; the batch's trajectories are packed into as many micro-batches as they
fill. The number of steps made is the whole position in the data: a restart goes on exactly.
"""

import functools
from pathlib import Path

import jax

from t1jax.config import Config, RejectionSection, SftSection, require
from t1jax.data.folder import Entry, list_entries
from t1jax.data.pipeline import epochs, reader
from t1jax.errors import UserError
from t1jax.model.qwen3_5 import Params
from t1jax.pipeline.feed import dump, make_feed, read_ahead
from t1jax.pipeline.learning import (
    Setup,
    abstract_policy,
    keep_config,
    load_policy,
    make_optimizer,
    open_setup,
    policy_path,
    save_policy,
    sft_stage,
)
from t1jax.pipeline.place import Placer, fetched
from t1jax.pipeline.profile import Clock, profiled
from t1jax.pipeline.session import Session, session
from t1jax.rl import steps
from t1jax.rl.inputs import SftInputs
from t1jax.rl.optimizer import Optimizer

SHOWN = ("loss", "gradient_norm", "tokens_per_s", "packing_efficiency")


def sft(config: Config, *, round: int = 0, profile: str = "") -> None:
    """`t1jax sft`.

    Args:
      config: with an `sft:` section.
      round: of rejection sampling, whose trajectories are fine-tuned on too; 0: before the first.
      profile: a directory for a trace of one step; empty: none.

    Raises:
      UserError: nothing to train on, or a guard stopped the run.
      Preempted: a signal came; the state is saved.
    """
    section, name = section_of(config, round), sft_stage(round)
    setup = open_setup(config.model_copy(update={"sft": section}))
    entries, counts = list_entries(
        *sources(config, round), keep=section.keep, per_task=section.per_task, seed=config.seed
    )
    keep_config(config)
    total = section.epochs * -(-len(entries) // section.batch_trajectories)
    optimizer = make_optimizer(section.optimizer, total)
    step = steps.make_sft_step(setup.policy, setup.run, optimizer)
    note = "; trajectories: " + ", ".join(f"{number} {name}" for name, number in counts.items())
    with session(setup, name, total=total, shown=SHOWN) as stage:
        params = fine_tune(setup, entries, optimizer, step, stage, note=note, profile=profile)
    print(f"wrote {save_policy(setup, params, name, total)}")


def section_of(config: Config, round: int) -> SftSection:
    """How a round is fine-tuned: as `sft` says, but for what `rejection` does.

    Raises:
      UserError: the config has no such round.
    """
    section: SftSection = require(config, "sft")
    if round == 0:
        return section
    rejection: RejectionSection = require(config, "rejection")
    if not 1 <= round <= rejection.rounds:
        raise UserError(
            f"round {round} of rejection sampling: expected 0 to rejection.rounds="
            f"{rejection.rounds}"
        )
    changes = {"epochs": rejection.epochs, "optimizer": rejection.optimizer}
    return section.model_copy(update=changes)


def sources(config: Config, round: int) -> list[str]:
    """The folders of trajectories that a round is fine-tuned on."""
    below = Path(config.run) / "trajectories"
    first = require(config, "sft").trajectories or str(below / config.rollout.name)
    return [first, *(str(below / rejection_name(number)) for number in range(1, round + 1))]


def rejection_name(round: int) -> str:
    """Of a round's folder below RUN/trajectories."""
    return f"rejection-{round}"


def fine_tune(
    setup: Setup,
    entries: list[Entry],
    optimizer: Optimizer,
    step: steps.Step[SftInputs],
    stage: Session,
    *,
    note: str = "",
    profile: str = "",
) -> Params:
    """Trains from the last saved state, or from the stage's first weights; the last weights."""
    learner, start = _begin(setup, optimizer, stage)
    stage.begin(start, note)
    section = require(setup.config, "sft")
    placer, clock = Placer(setup.run, section.batch.rows), Clock()
    batches = epochs(
        entries,
        batch_trajectories=section.batch_trajectories,
        count=section.epochs,
        seed=setup.config.seed,
    )
    feed = make_feed(setup, section.batch, routed=False)
    read = reader(batches, feed, start, workers=section.batch.workers)
    with jax.transfer_guard("disallow"):
        ahead = read_ahead(read, placer, section.batch.tokens)
        for number, (prepared, placed) in enumerate(ahead, start):
            with profiled(profile if number == start + 1 else ""):
                learner, told = step(learner, [SftInputs(batch) for batch in placed])
                row = {name: float(value) for name, value in fetched(told).items()}
            seconds = clock.lap()
            row |= {"seconds": seconds, "tokens_per_s": row["tokens"] / seconds}
            skipped = bool(row.pop("skipped"))
            dumped = functools.partial(dump, prepared)
            stage.told(number, row | prepared.facts, skipped=skipped, dump=dumped)
            stage.done(number + 1, {"actor": learner}, {}, -row["loss"])
    return learner.params


def _begin(setup: Setup, optimizer: Optimizer, stage: Session) -> tuple[steps.Learner, int]:
    found = stage.restore({"actor": abstract_policy(setup, optimizer)})
    if found is not None:
        return found.trees["actor"], found.step
    params = load_policy(setup, policy_path(setup.config, stage.stage))
    return steps.new_learner(setup.policy, setup.run, optimizer, params), 0
