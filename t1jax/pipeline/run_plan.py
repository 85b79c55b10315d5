"""What a run will take, told before any work: trials by stage, disk, and the sandboxes' time.

An upper estimate from the config alone, and from how many tasks and parameters there are. What it
cannot know beforehand is compiling and learning, which depend on the machine: after a run,
RUN/stages.jsonl has the seconds of every stage.
"""

import dataclasses
import math
import os
from pathlib import Path

import jax
from etils import epath

from t1jax.checkpoint.init_tiny import SIZES, config_document
from t1jax.checkpoint.tensor_files import read_json
from t1jax.config import Config
from t1jax.data.tasks import task_folders
from t1jax.model.config import from_huggingface
from t1jax.model.qwen3_5 import Qwen3_5, abstract_params
from t1jax.pipeline.learning import policy_stages
from t1jax.pipeline.run_stages import plays_demonstrations
from t1jax.pipeline.selection import candidate_steps

SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}  # as `t1jax tasks make` splits
TRIAL_BYTES = 48 << 10  # a trial's small files: 43 kB measured, of 1,600 demonstrations
TASK_BYTES = 48 << 10  # a task's directory, measured
TRIAL_CORE_S = 0.4  # of a core, a trial of the shipped tasks in the local sandbox: docs/pipeline.md
STATE_TREES = 3  # what a saved learner holds for each parameter: itself and two moments, float32
IDS = ("<|endoftext|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>", "<|vision_start|>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is left of a run takes at most this."""

    trials: dict[str, int]  # by stage
    parameters: int
    disk_bytes: int

    @property
    def sandbox_s(self) -> float:
        """Seconds of all trials, with every core of this machine at work on them."""
        return sum(self.trials.values()) * TRIAL_CORE_S / (os.cpu_count() or 1)


def plan_of(config: Config, done: frozenset[str] = frozenset()) -> Plan:
    """The plan of the stages that are not `done`."""
    trials = {name: n for name, n in _trials(config).items() if n and name not in done}
    parameters = _parameters(config)
    weights = [name for name in policy_stages(config) if name not in done]
    kept = config.checkpoints.keep_last * 2 + config.checkpoints.keep_best
    learners = len(weights) + ("critic" not in done) + ("ppo" not in done)
    # A saved state of PPO has two learners; each stage also writes its weights.
    disk = 4 * parameters * (STATE_TREES * kept * learners + len(weights) + 2)
    disk += sum(trials.values()) * (TRIAL_BYTES + _route_bytes(config))
    if config.tasks is not None and config.tasks.make is not None and "tasks" not in done:
        disk += config.tasks.make.count * TASK_BYTES
    return Plan(trials=trials, parameters=parameters, disk_bytes=disk)


def _trials(config: Config) -> dict[str, int]:
    """Of each stage that plays."""
    if config.tasks is None:
        return {}
    found: dict[str, int] = {}
    rollout, rejection, test = config.rollout, config.rejection, config.test
    if plays_demonstrations(config):
        found["demonstrations"] = _tasks(config, rollout.split, rollout.limit) * rollout.attempts
    for number in range(1, (rejection.rounds if rejection else 0) + 1):
        assert rejection is not None
        tasks = _tasks(config, "train", rejection.limit)
        found[f"rejection-{number}"] = tasks * rejection.attempts
    if config.critic is not None and config.ppo is not None:
        found["critic"] = config.critic.rollouts * config.critic.batch_trajectories
    if config.ppo is not None:
        found["ppo"] = config.ppo.steps * config.ppo.launch
        steps = candidate_steps(
            config.ppo.steps, config.checkpoints, config.selection.candidates
        )
        tasks = _tasks(config, "validation", config.selection.limit)
        found["selection"] = len(steps) * tasks * config.selection.attempts
    played = ["base", *(["sft"] if config.sft else []), *(["ppo"] if config.ppo else [])]
    for name in played:
        found[f"eval {name}"] = _tasks(config, "test", test.limit) * test.attempts
    return found


def _tasks(config: Config, split: str, limit: int) -> int:
    assert config.tasks is not None
    made, which = config.tasks.make, getattr(config.tasks, split)
    if made is not None and not Path(config.tasks.folder).exists():
        count = math.ceil(made.count * SHARES.get(which, 1.0))
    else:
        count = len(task_folders(config.tasks.folder, which))
    return min(count, limit) if limit else count


def _parameters(config: Config) -> int:
    document = epath.Path(config.model.checkpoint) / "config.json"
    if document.exists():
        text = read_json(document)
    elif config.init is not None:
        text = config_document(SIZES[config.init.size], dict.fromkeys(IDS, 0))
    else:
        return 0  # the checks refuse a checkpoint that is not there
    abstract = abstract_params(Qwen3_5(from_huggingface(text)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract))


def _route_bytes(config: Config) -> int:
    """Of one trial's tokens at most: ids, log-probs, mask, routes of a model not read here."""
    return config.agent.context_tokens * (4 + 4 + 4 + 1 + 16)
