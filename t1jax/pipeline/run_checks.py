"""What a run's config asks for that cannot work, refused before any work.

The config itself refuses what is wrong whatever is run (t1jax/config.py); here is what depends on
the machine, on files, or on all stages being run.
"""

import shutil
from pathlib import Path

from etils import epath

from sandbox.base import make_backend
from sandbox.tasks.families import FAMILIES
from t1jax.checkpoint.tensor_files import is_local
from t1jax.config import Config
from t1jax.data.tasks import task_folders
from t1jax.errors import UserError
from t1jax.evaluation.figures.shared import duration
from t1jax.pipeline.run_plan import Plan


def check(config: Config) -> None:
    """Refuses a config that some stage would fail on.

    Raises:
      UserError: names the key, its value, and what to do.
    """
    if config.tasks is None:
        raise UserError("the config has no `tasks:` section, which a whole run needs")
    if config.evaluation.endpoint:
        raise UserError(
            f"evaluation.endpoint={config.evaluation.endpoint!r}: a whole run evaluates its own "
            "checkpoints; use `t1jax eval` for a model behind a server"
        )
    _check_model(config)
    _check_tasks(config)
    _check_trajectories(config)
    make_backend(config.sandbox.kind, endpoints=config.sandbox.endpoints)  # its programs are there


def check_disk(config: Config, plan: Plan) -> None:
    """Refuses a run that this disk cannot hold.

    Raises:
      UserError: says how much is free, and how much is needed.
    """
    place = Path(config.run).absolute()
    while not place.exists():
        place = place.parent
    free_mb = shutil.disk_usage(place).free / 1e6
    needed_mb = plan.disk_bytes / 1e6
    if free_mb < needed_mb + config.checkpoints.min_free_mb:
        raise UserError(
            f"run={config.run!r}: its disk has {free_mb:.0f} MB free; the run may need "
            f"{needed_mb:.0f} MB, and checkpoints.min_free_mb={config.checkpoints.min_free_mb} "
            "have to stay: free some space, choose another `run:` folder, or keep fewer states "
            "(checkpoints.keep_last)"
        )


def tell(plan: Plan) -> str:
    """The plan in a line."""
    trials = ", ".join(f"{name} {count}" for name, count in plan.trials.items())
    return (
        f"plan: {plan.parameters / 1e6:.1f} million parameters; at most "
        f"{plan.disk_bytes / 1e6:.0f} MB of disk; {sum(plan.trials.values())} trials ({trials}): "
        f"about {duration(plan.sandbox_s)} of sandboxes, besides compiling and learning"
    )


def _check_model(config: Config) -> None:
    document = epath.Path(config.model.checkpoint) / "config.json"
    if config.init is None and not document.exists():
        raise UserError(
            f"model.checkpoint={config.model.checkpoint!r} holds no config.json; expected a "
            "checkpoint that `t1jax convert` wrote, or an `init:` section, by which the run makes "
            "a small random one"
        )


def _check_tasks(config: Config) -> None:
    section = config.tasks
    assert section is not None
    if section.make is None:
        for split in ("train", "validation", "test"):
            task_folders(section.folder, getattr(section, split))
        return
    unknown = [name for name in section.make.families if name not in FAMILIES]
    if unknown:
        raise UserError(
            f"tasks.make.families holds {unknown[0]!r}; there are {', '.join(sorted(FAMILIES))}"
        )


def _check_trajectories(config: Config) -> None:
    named = config.sft.trajectories if config.sft is not None else ""
    inside = Path(named).absolute().is_relative_to(Path(config.run).absolute())
    if named and is_local(epath.Path(named)) and not inside and not Path(named).is_dir():
        raise UserError(
            f"sft.trajectories={named!r} is no directory; expected trajectories that were "
            "recorded, or leave it out to record the tasks' own solutions"
        )
