"""A run's configuration: one frozen, typed tree from YAML and `--set a.b=c`, checked once.

Sections are small, so that a function takes only the one it reads. Every field is described here
and nowhere else; a wrong key is refused with its nearest right one, a wrong value with what is
allowed. Knows nothing of what the sections are used for.
"""

import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field

from t1jax.errors import UserError
from t1jax.overlays import in_run, read_tree

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Level = Annotated[int, Field(ge=1, le=5)]
Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """Frozen; unknown keys are errors; a number in quotes is no number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSection(Section):
    """Where the first weights come from, and how the model is executed."""

    checkpoint: str  # a converted checkpoint or a Hugging Face directory, tokenizer included
    mesh: str = ""  # devices along each axis, e.g. "data=2,expert=4"; empty: one device
    dtype: Dtype = "bfloat16"  # of activations, in training and sampling
    parameters: Dtype = "float32"  # as trained; masters are float32 either way
    remat: str = "none"
    grouped_matmul: str = ""  # empty: what suits the platform
    dispatch: Literal["gather", "ragged_all_to_all"] = "gather"


class InitSection(Section):
    """The random checkpoint that `t1jax run` makes, converted into model.checkpoint."""

    size: Literal["tiny", "demo"] = "demo"
    seed: Whole = 0


class MakeSection(Section):
    """Tasks that `t1jax run` makes, as `t1jax tasks make`. Empty lists: every one there is."""

    count: Count = 2000
    seed: Whole = 0
    levels: Annotated[tuple[Level, ...], Field(strict=False)] = ()
    families: Annotated[tuple[str, ...], Field(strict=False)] = ()


class TasksSection(Section):
    """The folder that `t1jax tasks make` wrote, and which of its tasks are used."""

    folder: str
    make: MakeSection | None = None  # none: the folder is there already
    train: str = "train"  # a split, or a list that `t1jax tasks select` wrote
    validation: str = "validation"
    test: str = "test"


class SandboxSection(Section):
    kind: Literal["local", "docker"] = "local"
    jobs: Count = 8  # sandboxes at once
    endpoints: str = ""  # docker: several engines, as `t1jax trial --help` says
    verification: Literal["", "fresh", "shared"] = ""  # empty: as each task asks
    attempts: Count = 2  # of a trial that infrastructure broke


class AgentSection(Section):
    """The limits of one episode."""

    turns: Count = 200
    context_tokens: Count = 86016  # of the whole stream
    turn_tokens: Count = 8192
    seconds: Seconds = 3600.0
    command_seconds: Seconds = 120.0
    output_characters: Count = 8192  # of a command's output that the model reads
    thinking: bool = True
    system: str = ""  # a system message before the task's instruction
    list_tools: bool = True  # False: a policy that was trained on the tools is not told of them


class SamplingSection(Section):
    """How tokens are drawn."""

    temperature: NotNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Whole = 0


class SamplerSection(Section):
    """The engine: fixed shapes, so that a run compiles a handful of programs."""

    slots: Count = 16  # sequences that decode together
    context: Count = 86016  # tokens of one slot's cache
    prefill_chunk: Count = 512
    cache_mb: Whole = 1024  # kept caches of finished turns
    steps_per_round: Count = 1  # decode steps between two looks at the queue
    capture_routes: bool = True
    waiting: Count = 4096  # requests that may wait for a slot


class OptimizerSection(Section):
    """As rl/optimizer.OptimizerConfig; `steps` is set by the stage."""

    learning_rate: NotNegative
    schedule: Literal["constant", "cosine"] = "constant"
    final_learning_rate: NotNegative = 0.0
    warmup_steps: Whole = 0
    b1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    b2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    max_gradient_norm: Positive = 1.0
    moments_dtype: Dtype = "float32"


class BatchSection(Section):
    """How trajectories become rows of fixed length."""

    tokens: Count = 86016  # of a row
    rows: Count = 1  # of a micro-batch; the data axis divides it
    packed: bool = True
    too_long: Literal["error", "leave_out"] = "error"  # a chunk longer than a row
    workers: Whole = 0  # grain's processes; 0: in this one


class SftSection(Section):
    trajectories: str = ""  # a folder of trajectories; empty: what `t1jax rollout` writes
    epochs: Count = 1
    batch_trajectories: Count = 128
    keep: Literal["solved", "all"] = "solved"
    per_task: Whole = 10  # at most; 0: all
    optimizer: OptimizerSection
    batch: BatchSection = BatchSection()


class RejectionSection(Section):
    """Rounds of sampling from the fine-tuned policy, on the training tasks.

    What each round solves is fine-tuned on, together with sft.trajectories and the rounds before;
    the rest is as `sft` says.
    """

    rounds: Count = 1
    limit: Whole = 0  # tasks a round, another sample each; 0: all
    attempts: Count = 4  # of each task
    sampling: SamplingSection = SamplingSection()
    epochs: Count = 1
    optimizer: OptimizerSection


class CriticSection(Section):
    """Critic-only training before PPO; the policy stays as it is."""

    trajectories: str = ""  # a folder of trajectories, or none
    epochs: Count = 1
    batch_trajectories: Count = 512
    rollouts: Whole = 2  # rollouts of the policy besides
    optimizer: OptimizerSection
    value_clip: Positive = 0.2
    reward: Literal["fraction", "binary", "gained"] = "fraction"
    batch: BatchSection = BatchSection()


class PpoSection(Section):
    steps: Count
    launch: Count = 560  # trials started a step
    batch_trajectories: Count = 512  # the first so many to finish are trained on
    staleness: Literal[0, 1] = 1
    replay: bool = True  # R3
    on_missing: Literal["error", "live"] = "error"
    tokens: Literal["sampled", "retokenised"] = "sampled"  # TITO, or its ablation
    reward: Literal["fraction", "binary", "gained"] = "fraction"
    baseline: Literal["critic", "group"] = "critic"  # group: GRPO-style, no critic
    warm_critic: str = ""  # another run, whose warmed critic is taken; empty: this one's, if any
    group: Count = 1  # attempts at one task in a step
    clip: Positive = 0.2
    value_clip: Positive = 0.2
    gamma: Share = 1.0
    lam: Share = 1.0
    minibatches: Count = 1
    kl: NotNegative = 0.0  # coefficient in the loss, to the policy that PPO began with
    kl_reward: NotNegative = 0.0  # coefficient in the reward
    entropy: NotNegative = 0.0
    normalize_rewards: bool = False  # over a step's trajectories
    normalize_advantages: bool = False  # over a step's sampled tokens
    importance: Literal["none", "truncated", "masked"] = "none"  # correction for the sampler
    importance_cap: Positive = 2.0
    offload: bool = False  # what a phase does not use goes to host memory
    actor: OptimizerSection
    critic: OptimizerSection
    sampling: SamplingSection = SamplingSection()
    batch: BatchSection = BatchSection()


class SelectionSection(Section):
    """Which of PPO's saved states is the run's result: the best on the validation split."""

    candidates: Count = 3  # the last so many that are kept
    attempts: Count = 1  # of each task
    limit: Whole = 0  # tasks, a sample drawn with `seed`; 0: all


class TestSection(Section):
    """What `t1jax run` evaluates on the test split: base, SFT and PPO, once each."""

    attempts: Count = 3
    limit: Whole = 0  # tasks, a sample drawn with `seed`; 0: all


class MismatchSection(Section):
    """What `t1jax run` measures of the log-prob gap, on PPO's first rollout."""

    limit: Whole = 0  # trajectories, a sample; 0: all
    batch_tokens: Count = 16384  # most tokens in a pass


class CheckpointSection(Section):
    every_steps: Count = 10
    keep_last: Count = 3
    keep_best: Whole = 1
    min_free_mb: Whole = 2048  # below this the run stops before it saves


class GuardsSection(Section):
    skipped_in_a_row: Count = 3  # steps that were not finite; then the run stops
    stalled_seconds: Seconds = 3600.0  # a stage without progress fails with every stack


class RolloutSection(Section):
    """`t1jax rollout`: trajectories of many tasks, to look at or to fine-tune on."""

    name: str = "rollout"  # of the folder below RUN/trajectories
    checkpoint: str = ""  # who plays; empty: the run's last weights, else model.checkpoint
    # solution: says each task's own solution instead of sampling.
    policy: Literal["model", "solution"] = "model"
    split: Literal["train", "validation", "test"] = "train"
    limit: Whole = 0  # tasks, a sample drawn with `seed`; 0: all
    attempts: Count = 1  # of each task
    reward: Literal["assertions", "fraction", "fraction_bonus", "binary", "gained"] = "fraction"
    sampling: SamplingSection = SamplingSection()


class EvaluationSection(Section):
    checkpoint: str = ""  # empty: the run's last weights, else model.checkpoint
    name: str = ""  # of the folder below RUN/evaluation; empty: the split's
    endpoint: str = ""  # an OpenAI-compatible server's URL, which answers instead of the checkpoint
    endpoint_model: str = ""  # the model's name there
    attempts: Count = 3  # of each task
    split: Literal["train", "validation", "test"] = "validation"
    limit: Whole = 0  # tasks, a sample drawn with `seed`; 0: all
    sampling: SamplingSection = SamplingSection(temperature=0.1, top_p=0.95, top_k=20)


class Config(Section):
    run: str  # the run's folder
    seed: Whole = 0
    model: ModelSection
    init: InitSection | None = None  # none: model.checkpoint is there already
    tasks: TasksSection | None = None
    sandbox: SandboxSection = SandboxSection()
    agent: AgentSection = AgentSection()
    sampler: SamplerSection = SamplerSection()
    sft: SftSection | None = None
    rejection: RejectionSection | None = None
    critic: CriticSection | None = None
    ppo: PpoSection | None = None
    rollout: RolloutSection = RolloutSection()
    evaluation: EvaluationSection = EvaluationSection()
    selection: SelectionSection = SelectionSection()
    test: TestSection = TestSection()
    mismatch: MismatchSection = MismatchSection()
    checkpoints: CheckpointSection = CheckpointSection()
    guards: GuardsSection = GuardsSection()

    @pydantic.model_validator(mode="after")
    def _sections_fit(self) -> Self:
        agent, sampler, ppo = self.agent, self.sampler, self.ppo
        _refuse(
            agent.context_tokens > sampler.context,
            f"agent.context_tokens={agent.context_tokens} is above sampler.context="
            f"{sampler.context}: an episode has to fit in a slot",
        )
        _refuse(
            self.rejection is not None and self.sft is None,
            "rejection samples from the policy that `sft` fine-tuned, and there is no `sft:` "
            "section; add one, or leave `rejection:` out",
        )
        if ppo is None:
            return self
        _refuse(
            ppo.launch % ppo.group != 0,
            f"ppo.launch={ppo.launch} is no multiple of ppo.group={ppo.group}: every task of a "
            "step is attempted so many times",
        )
        _refuse(
            ppo.launch < ppo.batch_trajectories,
            f"ppo.launch={ppo.launch} is below ppo.batch_trajectories={ppo.batch_trajectories}: "
            "a step trains on trials that it started",
        )
        _refuse(
            ppo.baseline == "group" and ppo.group < 2,
            f"ppo.baseline=group compares attempts at one task; ppo.group={ppo.group} has to be "
            "2 or more",
        )
        _refuse(
            ppo.replay and not sampler.capture_routes,
            "ppo.replay=True needs the routes that sampler.capture_routes=False leaves out; "
            "change one of them",
        )
        _refuse(
            ppo.batch_trajectories % ppo.minibatches != 0,
            f"ppo.batch_trajectories={ppo.batch_trajectories} does not split evenly into "
            f"ppo.minibatches={ppo.minibatches}",
        )
        return self


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ValueError(message)


def load_config(path: str | Path, changes: Sequence[str] = ()) -> Config:
    """Reads a YAML file, applies `a.b=c` changes and checks the whole.

    A file that says `base: OTHER.yaml` holds changes to that one. `{run}` in a text is the run's
    folder.

    Raises:
      UserError: names the file or the change, the key's path, its value and what is allowed.
    """
    tree = read_tree(Path(path))
    for change in changes:
        _apply(tree, change)
    return parse_config(tree, str(path))


def parse_config(tree: dict[str, Any], source: str) -> Config:
    """Checks a tree of plain values; `source` is named in errors."""
    if isinstance(tree.get("run"), str):
        tree = in_run(tree, tree["run"])
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        raise UserError(f"{source}: " + "; ".join(map(_explain, error.errors()))) from None


def to_yaml(config: Config) -> str:
    """The resolved config, every default written out; `load_config` reads it back equal."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


def require(config: Config, section: str) -> Any:
    """A section that a command needs and a config may leave out."""
    found = getattr(config, section)
    if found is None:
        raise UserError(f"the config has no `{section}:` section, which this command needs")
    return found


def _apply(tree: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise UserError(f"--set {change!r}: expected key=value, such as ppo.clip=0.1")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {change!r}: the value is no YAML: {error}") from None
    *above, name = key.split(".")
    for part in above:
        if tree.get(part) is None:
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            raise UserError(f"--set {change!r}: {part} is a value, not a section")
    tree[name] = value


def _explain(error: Any) -> str:
    path = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        *above, name = error["loc"]
        known = list(_section_at(above).model_fields)
        near = difflib.get_close_matches(str(name), known, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
        return f"unknown key {path}; {hint}"
    if error["type"] == "missing":
        return f"{path} is missing"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{path}={error['input']!r}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _section_at(path: Sequence[Any]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for name in path:
        kinds = typing.get_args(section.model_fields[name].annotation) or (
            section.model_fields[name].annotation,
        )
        section = next(
            kind for kind in kinds if isinstance(kind, type) and kind is not types.NoneType
        )
    return section
