"""What the learning stages share: the models, how they run, their optimizers, the run's folder.

RUN/config.yaml              as resolved, every default written out
RUN/checkpoints/STAGE/N      train states (checkpoint/train_state)
RUN/weights/STAGE            the stage's last weights, as `t1jax convert` makes a checkpoint
RUN/trajectories/...         what rollouts recorded
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import yaml
from etils import epath

from t1jax.checkpoint.publish import write_weights
from t1jax.checkpoint.restore import open_checkpoint
from t1jax.checkpoint.tensor_files import read_json
from t1jax.checkpoint.train_state import TrainStates
from t1jax.config import Config, OptimizerSection, to_yaml
from t1jax.errors import UserError
from t1jax.model.config import from_huggingface
from t1jax.model.execution import Execution, default_execution
from t1jax.model.qwen3_5 import Params, Qwen3_5
from t1jax.model.sharding import make_mesh
from t1jax.rl import steps
from t1jax.rl.optimizer import Optimizer, OptimizerConfig, recipe
from t1jax.trajectory.record import RouteShape

# What may differ when a run goes on: it changes no number that a finished step computed.
MAY_CHANGE = (
    "run", "model.mesh", "sandbox", "checkpoints", "guards", "evaluation", "ppo.steps",
    "selection", "test", "mismatch",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """The policy's and the critic's architecture, and how both are executed."""

    config: Config
    policy: Qwen3_5
    critic: Qwen3_5
    run: Execution

    @property
    def shape(self) -> RouteShape:
        """Of the routes that this model's trajectories hold."""
        model = self.policy.config
        return RouteShape(layers=model.layers, chosen=model.moe.chosen, experts=model.moe.experts)

    @property
    def folder(self) -> Path:
        return Path(self.config.run)


def open_setup(config: Config) -> Setup:
    """Reads the sizes from the checkpoint; no weights yet.

    Raises:
      UserError: the checkpoint's config.json is none of ours.
      ValueError: the mesh does not fit the devices.
    """
    section = config.model
    document = epath.Path(section.checkpoint) / "config.json"
    model = from_huggingface(read_json(document), str(document))
    changes: dict[str, str] = {"dtype": section.dtype, "remat": section.remat}
    changes["dispatch"] = section.dispatch
    if section.grouped_matmul:
        changes["grouped_matmul"] = section.grouped_matmul
    run = default_execution(make_mesh(section.mesh), **changes)
    return Setup(config=config, policy=Qwen3_5(model), critic=Qwen3_5(model, "value"), run=run)


def make_optimizer(section: OptimizerSection, total_steps: int) -> Optimizer:
    """The recipe's optimizer with a section's numbers."""
    fields = section.model_dump()
    return Optimizer(recipe(OptimizerConfig(**fields, steps=total_steps)))


# ---- the run's folder ----------------------------------------------------------------------------


def keep_config(config: Config) -> None:
    """Writes RUN/config.yaml, or compares it with what the run began with.

    Raises:
      UserError: a value differs that finished steps depend on.
    """
    file = Path(config.run) / "config.yaml"
    if file.exists():
        before = leaves(yaml.safe_load(file.read_text()))
        now = leaves(yaml.safe_load(to_yaml(config)))
        keys = sorted(set(before) | set(now))
        changed = [k for k in keys if before.get(k) != now.get(k) and not may_change(k)]
        told = [f"{k}={now.get(k)!r}, was {before.get(k)!r}" for k in changed]
        if told:
            raise UserError(
                f"{file} is of a run with another config: {'; '.join(told[:5])}. Choose another "
                "`run:` folder, or change these back to go on"
            )
    write_config(config)


def write_config(config: Config) -> None:
    """Writes RUN/config.yaml, whatever is there."""
    if jax.process_index() == 0:
        file = Path(config.run) / "config.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.new")  # other processes read it, at any moment
        new.write_text(to_yaml(config))
        new.replace(file)


def leaves(tree: Any, above: str = "") -> dict[str, Any]:
    """Values by the whole path of their keys."""
    if not isinstance(tree, dict):
        return {above: tree}
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= leaves(value, f"{above}.{name}" if above else name)
    return found


def may_change(key: str) -> bool:
    """Whether no finished step depends on this key."""
    return any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)


def open_states(config: Config, stage: str) -> TrainStates:
    """The saved steps of a stage."""
    section = config.checkpoints
    return TrainStates(
        Path(config.run).absolute() / "checkpoints" / stage,
        keep_last=section.keep_last,
        keep_best=section.keep_best,
        min_free_mb=section.min_free_mb,
        every=section.every_steps,
    )


# ---- weights -------------------------------------------------------------------------------------


def sft_stage(round: int) -> str:
    """The name of fine-tuning after a round of rejection sampling; 0: the first, before any."""
    return f"sft-{round}" if round else "sft"


def policy_stages(config: Config) -> tuple[str, ...]:
    """The stages that change the policy, in order."""
    rounds = config.rejection.rounds if config.rejection else 0
    return (*map(sft_stage, range(rounds + 1)), "ppo")


def policy_path(config: Config, before: str = "") -> str:
    """The checkpoint that a stage begins from: the last one that an earlier stage wrote.

    Args:
      config: of the run.
      before: a stage; empty: whatever there is, for sampling and evaluation.
    """
    stages = policy_stages(config)
    earlier = stages[: stages.index(before)] if before in stages else stages
    for stage in reversed(earlier):
        written = Path(config.run) / "weights" / stage
        if (written / "manifest.json").exists():
            return str(written)
    return config.model.checkpoint


def load_policy(setup: Setup, path: str) -> Params:
    """The policy's parameters as they are trained, where the mesh wants them."""
    _, params = open_checkpoint(path, setup.policy, setup.run.mesh, setup.config.model.parameters)
    return params


def save_policy(setup: Setup, params: Params, stage: str, steps: int, name: str = "") -> Path:
    """Writes a stage's weights after so many steps: weights/NAME, by default the stage's."""
    path = setup.folder / "weights" / (name or stage)
    dtype = setup.config.model.parameters
    write_weights(
        params, setup.config.model.checkpoint, path.absolute(), dtype,
        trained={"stage": stage, "steps": steps},
    )  # fmt: skip
    return path


# ---- critics -------------------------------------------------------------------------------------


def new_critic(
    setup: Setup, optimizer: Optimizer, policy: Params, mean_reward: float
) -> steps.Learner:
    """A critic before its first step: the policy's body and a head that says the mean."""
    mean = jax.device_put(jax.numpy.float32(mean_reward))
    params = steps.critic_params(setup.critic, setup.run, policy, mean)
    return steps.new_learner(setup.critic, setup.run, optimizer, params)


def abstract_policy(setup: Setup, optimizer: Optimizer) -> steps.Learner:
    """What the policy's learner is restored into."""
    dtype = setup.config.model.parameters
    return steps.abstract_learner(setup.policy, setup.run, optimizer, dtype)


def abstract_critic(setup: Setup, optimizer: Optimizer) -> steps.Learner:
    """What the critic's learner is restored into."""
    dtype = setup.config.model.parameters
    return steps.abstract_learner(setup.critic, setup.run, optimizer, dtype)


@functools.partial(jax.jit)
def copied(tree: Any) -> Any:
    """New arrays: what a learner donates must not be anybody else's."""
    return jax.tree.map(jax.numpy.copy, tree)
