"""The `t1jax` command: each command parses its arguments and makes one call, nothing else.

What a command calls is imported inside it, so that `t1jax --help` needs neither jax nor a file.
Exit statuses: 0 done, 1 failed (the reason is the last line of stderr), 2 bad usage,
75 preempted (the same command goes on), 130 and 143 ended by Ctrl-C and SIGTERM.
"""

import dataclasses
import enum
import re
import sys
import traceback
from typing import Annotated

import typer

from t1jax import __version__, errors
from t1jax.interrupts import Interrupted, raised_on_signals

app = typer.Typer(
    name="t1jax",
    help="Agentic reinforcement learning of Qwen3.5-MoE in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

UNIT_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNIT_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Dtype(enum.StrEnum):
    """What weights and activations are held in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Size(enum.StrEnum):
    """Small models that init-tiny makes."""

    tiny = "tiny"
    demo = "demo"


class OnMissing(enum.StrEnum):
    """What replay does at a position whose routes were not recorded (a row of -1)."""

    live = "live"
    error = "error"


@dataclasses.dataclass(kw_only=True)
class Options:
    """Options of `t1jax` itself, filled while typer parses."""

    traceback: bool = False


def size_in_bytes(text: str) -> int:
    """Reads 5GB (powers of 1000), 5GiB (powers of 1024) or a plain count of bytes."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*((?:[KMGT]i?)?B|)", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is no size; write a number and B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, "
            "for example 5GB"
        )
    count_bytes = int(float(match[1]) * UNIT_BYTES[match[2].upper()])
    if count_bytes == 0:
        raise typer.BadParameter(f"{text!r} is zero bytes; write for example 5GB or 500MB")
    return count_bytes


def not_negative(number: int) -> int:
    """Refuses a number below zero, naming it, which typer's `min` does not."""
    if number < 0:
        raise typer.BadParameter(f"{number} is negative; write 0 or more")
    return number


Mesh = Annotated[str, typer.Option(help="Devices along each axis, e.g. data=2,expert=4.")]
ConfigFile = Annotated[str, typer.Argument(help="A YAML file, such as configs/tiny.yaml.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="A change, such as ppo.clip=0.1; repeat.")
]


@app.callback()
def options(
    context: typer.Context,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error came from.")
    ] = False,
) -> None:
    context.obj.traceback = traceback


@app.command()
def convert(
    src: Annotated[str, typer.Argument(help="A Hugging Face checkpoint directory.")],
    dst: Annotated[str, typer.Argument(help="Where the t1jax checkpoint goes.")],
    mesh: Mesh = "",
    dtype: Annotated[Dtype | None, typer.Option(help="Cast to; as in SRC if not given.")] = None,
    verify: Annotated[bool, typer.Option(help="Read back and compare every tensor.")] = False,
) -> None:
    """Make a t1jax checkpoint from a Hugging Face one."""
    from t1jax.checkpoint.convert import convert
    from t1jax.progress import Progress

    with Progress() as progress:
        convert(src, dst, mesh=mesh, verify=verify, dtype=dtype or "", progress=progress)
    print(f"wrote {dst}")


@app.command()
def export(
    src: Annotated[str, typer.Argument(help="A t1jax checkpoint.")],
    dst: Annotated[str, typer.Argument(help="Where the Hugging Face directory goes.")],
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Leave out the vision and MTP tensors.")
    ] = False,
    max_shard_size: Annotated[
        int | None,
        typer.Option(
            parser=size_in_bytes,
            metavar="SIZE",
            help="Largest file, e.g. 500MB or 4GiB; 5GB, or the largest tensor, if not given.",
        ),
    ] = None,
) -> None:
    """Make a Hugging Face checkpoint from a t1jax one."""
    from t1jax.checkpoint.export import export

    export(src, dst, text_only=text_only, max_shard_bytes=max_shard_size)
    print(f"wrote {dst}")


@app.command()
def init_tiny(
    dst: Annotated[str, typer.Argument(help="Where the Hugging Face directory goes.")],
    seed: Annotated[int, typer.Option(callback=not_negative, help="Seed of the weights.")] = 0,
    size: Annotated[Size, typer.Option(help="Which small model.")] = Size.tiny,
) -> None:
    """Write a small random checkpoint in the published layout."""
    from t1jax.checkpoint.init_tiny import init_tiny

    init_tiny(dst, seed=seed, size=str(size))
    print(f"wrote {dst}")


@app.command()
def score(
    checkpoint: Annotated[str, typer.Argument(help="A t1jax or Hugging Face checkpoint.")],
    input: Annotated[str, typer.Argument(help="input_ids [B,S], lengths [B]; .safetensors")],
    output: Annotated[str, typer.Argument(help="logprobs [B,S-1] and routes; .safetensors")],
    replay: Annotated[
        bool, typer.Option("--replay", help="Use INPUT's routed_experts instead of the router's.")
    ] = False,
    logits: Annotated[bool, typer.Option("--logits", help="Write the logits as well.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Type of weights and activations.")] = Dtype.float32,
    mesh: Mesh = "",
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens in one forward pass, padding included.")
    ] = 16384,
    on_missing: Annotated[
        OnMissing, typer.Option(help="With --replay, where no routes were recorded.")
    ] = OnMissing.live,
) -> None:
    """Log-probabilities and expert routes of given tokens."""
    from t1jax.score import score

    score(
        checkpoint,
        input,
        output,
        replay=replay,
        logits=logits,
        dtype=str(dtype),
        mesh=mesh,
        batch_tokens=batch_tokens,
        on_missing=str(on_missing),
    )


@app.command()
def sample(
    checkpoint: Annotated[str, typer.Argument(help="A t1jax or Hugging Face checkpoint.")],
    prompts: Annotated[str, typer.Argument(help="JSON lines: prompt or prompt_ids, max_tokens …")],
    output: Annotated[str, typer.Argument(help="JSON lines: ids, text, logprobs; and routes.")],
    dtype: Annotated[Dtype, typer.Option(help="Type of weights and activations.")] = Dtype.float32,
    mesh: Mesh = "",
    slots: Annotated[int, typer.Option(min=1, help="Prompts continued together.")] = 16,
    prefill_chunk: Annotated[
        int, typer.Option(min=1, help="Most prompt tokens read at once, a power of two.")
    ] = 512,
    steps_per_round: Annotated[
        int, typer.Option(min=1, help="Decode steps in a row while no prompt waits.")
    ] = 4,
) -> None:
    """Continue prompts: tokens with their log-probs and expert routes."""
    from t1jax.sampling.sample import sample

    sample(
        checkpoint, prompts, output, mesh=mesh, dtype=str(dtype), slots=slots,
        prefill_chunk=prefill_chunk, steps_per_round=steps_per_round,
    )  # fmt: skip


Profile = Annotated[
    str, typer.Option(help="Directory for jax's trace of one step, for TensorBoard; none if empty.")
]


@app.command("run")
def run_all(
    config: ConfigFile,
    changes: Changes = None,
    redo: Annotated[
        str, typer.Option(help="Remove what this stage and those after it made; then go on.")
    ] = "",
) -> None:
    """Every stage, from tasks to the report; goes on where it was."""
    from t1jax.config import load_config
    from t1jax.pipeline.run import run

    run(load_config(config, changes or ()), redo=redo)


@app.command()
def sft(
    config: ConfigFile,
    changes: Changes = None,
    profile: Profile = "",
    round: Annotated[
        int, typer.Option(min=0, help="Of rejection sampling; 0: before the first.")
    ] = 0,
) -> None:
    """Fine-tune the policy on recorded trajectories."""
    from t1jax.config import load_config
    from t1jax.pipeline.sft import sft

    sft(load_config(config, changes or ()), round=round, profile=profile)


@app.command()
def critic(config: ConfigFile, changes: Changes = None) -> None:
    """Warm up the critic; the policy stays as it is."""
    from t1jax.config import load_config
    from t1jax.pipeline.critic import critic

    critic(load_config(config, changes or ()))


@app.command()
def ppo(config: ConfigFile, changes: Changes = None, profile: Profile = "") -> None:
    """Train the policy by PPO on its own rollouts."""
    from t1jax.config import load_config
    from t1jax.pipeline.ppo import ppo

    ppo(load_config(config, changes or ()), profile=profile)


@app.command()
def rollout(config: ConfigFile, changes: Changes = None) -> None:
    """Play tasks with a model and keep the trajectories."""
    from t1jax.config import load_config
    from t1jax.pipeline.rollout import rollout

    rollout(load_config(config, changes or ()))


@app.command("eval")
def evaluate(
    config: ConfigFile,
    changes: Changes = None,
    key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="Of evaluation.endpoint, where it asks.")
    ] = "",
) -> None:
    """Pass@1 with its interval: a checkpoint, or any model behind a server."""
    from t1jax.config import load_config
    from t1jax.evaluation.run import evaluate

    evaluate(load_config(config, changes or ()), key=key)


Run = Annotated[str, typer.Argument(help="A run's folder: the `run:` of its config.")]


@app.command()
def report(run: Run) -> None:
    """Write RUN/report: a page of figures, and summary.json."""
    from t1jax.evaluation.report import report

    report(run)


@app.command()
def compare(
    run_a: Run,
    run_b: Run,
    out: Annotated[
        str, typer.Option(help="Directory for the page; RUN_B/compare/NAME_OF_A if empty.")
    ] = "",
) -> None:
    """Two runs: config, curves, paired tests on the same tasks."""
    from t1jax.evaluation.compare import compare

    compare(run_a, run_b, out)


@app.command()
def ablate(
    config: ConfigFile,
    overlays: Annotated[
        list[str], typer.Argument(help="Configs with it as `base:`, such as configs/ablations/*.")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Of each, from the config's own on.")] = 3,
    changes: Changes = None,
) -> None:
    """PPO with one thing changed each time, from shared weights, over several seeds."""
    from t1jax.evaluation.ablate import ablate

    ablate(config, overlays, seeds=seeds, changes=changes or ())


@app.command()
def mismatch(
    trajectories: Annotated[str, typer.Argument(help="A folder of trajectories, or a run's.")],
    checkpoint: Annotated[str, typer.Option(help="Who sampled; as the run says if empty.")] = "",
    after: Annotated[
        str, typer.Option(help="Another checkpoint: tells how far an update moved.")
    ] = "",
    out: Annotated[str, typer.Option(help="A JSON file; RUN/mismatch.json if empty.")] = "",
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of activations; the run's, else float32.")
    ] = None,
    mesh: Mesh = "",
    limit: Annotated[int, typer.Option(min=0, help="Trajectories, a sample; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(callback=not_negative, help="Of that and of intervals.")] = 0,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens in one forward pass, padding included.")
    ] = 16384,
    on_missing: Annotated[
        OnMissing, typer.Option(help="Where no route was recorded.")
    ] = OnMissing.error,
) -> None:
    """Measure the log-prob gap with and without replay and token-in-token-out."""
    from t1jax.pipeline.mismatch import mismatch

    mismatch(
        trajectories, checkpoint=checkpoint, after=after, out=out, dtype=dtype or "", mesh=mesh,
        limit=limit, seed=seed, batch_tokens=batch_tokens, on_missing=str(on_missing),
    )  # fmt: skip


sandboxes = typer.Typer(no_args_is_help=True, help="What sandboxes share.")
app.add_typer(sandboxes, name="sandbox")


@sandboxes.command("clean")
def sandbox_clean(
    endpoints: Annotated[
        str, typer.Option(help="Engines, comma-separated; DOCKER_HOST or the local one if empty.")
    ] = "",
    run: Annotated[str, typer.Option(help="Remove all of this run, even if it still lives.")] = "",
    older_than_h: Annotated[
        float, typer.Option(min=0, help="Also what any host made so many hours ago; 0: off.")
    ] = 0.0,
) -> None:
    """Remove containers and control groups that killed runs left behind."""
    import asyncio

    from sandbox.janitor import clean

    cleaned = asyncio.run(clean(endpoints=endpoints, run_id=run, older_than_s=older_than_h * 3600))
    print(f"removed {cleaned.containers} containers and {cleaned.groups} control groups; "
          f"{cleaned.kept} containers belong to live runs or other hosts")  # fmt: skip
    if cleaned.no_engine:
        print(f"there is no engine, so no container was looked for: {cleaned.no_engine}")


tasks = typer.Typer(no_args_is_help=True, help="Terminal tasks: make them, choose among them.")
app.add_typer(tasks, name="tasks")


class Back(enum.StrEnum):
    """Where sandboxes run."""

    local = "local"
    docker = "docker"


class Verification(enum.StrEnum):
    """Where the verifier runs: as the task asks for, in a new sandbox, or in the agent's."""

    task = "task"
    fresh = "fresh"
    shared = "shared"


Where = Annotated[Back, typer.Option(help="The back end that runs sandboxes.")]
Endpoints = Annotated[str, typer.Option(help="Docker engines, as URL=CAPACITY,…; or DOCKER_HOST.")]
Verify = Annotated[Verification, typer.Option(help="Where the verifier runs.")]
Limit = Annotated[float, typer.Option(help="Longest time of the agent, beside the task's own.")]


@tasks.command("make")
def tasks_make(
    out: Annotated[str, typer.Argument(help="Where train, validation and test go.")],
    count: Annotated[int, typer.Option(min=1, help="How many tasks in all.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of every choice.")] = 0,
    level: Annotated[list[int] | None, typer.Option(help="Only this level (1 to 5).")] = None,
    family: Annotated[list[str] | None, typer.Option(help="Only this family; repeat.")] = None,
) -> None:
    """Generate tasks in Harbor's format, in splits that share no parameter."""
    from sandbox.commands import make_tasks

    make_tasks(out, seed=seed, count=count, levels=level or (), families=family or ())


@tasks.command("select")
def tasks_select(
    audit: Annotated[str, typer.Argument(help="What `t1jax audit --out` wrote.")],
    keep: Annotated[str, typer.Option(help="Decisions to keep, comma-separated.")] = "accept",
    seed: Annotated[int, typer.Option(help="Seed of the order.")] = 0,
    count: Annotated[int | None, typer.Option(min=1, help="At most so many.")] = None,
    min_score: Annotated[float | None, typer.Option(help="Least total of the scorer.")] = None,
    out: Annotated[str, typer.Option(help="File for the list; standard output if empty.")] = "",
) -> None:
    """Write a shuffled list of audited tasks."""
    from sandbox.commands import select_tasks

    kept = [part.strip() for part in keep.split(",")]
    select_tasks(audit, keep=kept, seed=seed, count=count, min_score=min_score, out=out)


@app.command()
def trial(
    task: Annotated[str, typer.Argument(help="A task directory.")],
    agent: Annotated[str, typer.Option(help="oracle, nop, cheat, script or replay.")] = "oracle",
    sandbox: Where = Back.local,
    endpoints: Endpoints = "",
    verification: Verify = Verification.task,
    agent_timeout_s: Limit = float("inf"),
    commands: Annotated[str, typer.Option(help="For script: a file, one command a line.")] = "",
    trajectory: Annotated[str, typer.Option(help="For replay: a trial's trajectory.jsonl.")] = "",
    audit: Annotated[str, typer.Option(help="The task's audit, which fixes what counts.")] = "",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the trial's directory.")] = False,
    out: Annotated[str, typer.Option(help="Where its directory is kept: --keep, in trials.")] = "",
) -> None:
    """Run one trial of a task and print its result as JSON."""
    from sandbox import commands as run
    from sandbox.trial import TrialConfig

    asked = "" if verification is Verification.task else str(verification)
    run.trial(
        task,
        agent=run.make_agent(agent, commands=commands, trajectory=trajectory),
        sandbox=str(sandbox),
        endpoints=endpoints,
        config=TrialConfig(verification=asked, agent_timeout_s=agent_timeout_s),
        audit=audit,
        keep=out or ("trials" if keep else ""),
    )


@app.command()
def audit(
    tasks: Annotated[str, typer.Argument(help="A task directory, or a folder of them.")],
    out: Annotated[str, typer.Option(help="JSONL, one line a task; goes on where it ended.")],
    sandbox: Where = Back.local,
    endpoints: Endpoints = "",
    jobs: Annotated[int, typer.Option(min=1, help="Tasks at a time.")] = 2,
    verification: Verify = Verification.task,
    agent_timeout_s: Limit = float("inf"),
    score_url: Annotated[
        str, typer.Option(help="Also score: an OpenAI-compatible server, e.g. http://host:8000/v1.")
    ] = "",
    score_model: Annotated[str, typer.Option(help="The model that scores.")] = "",
    score_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="The server's key.")] = "",
) -> None:
    """Check that tasks can be solved, cannot be cheated, and are worth training on."""
    from sandbox import commands as run
    from sandbox.scorer import Endpoint
    from sandbox.trial import TrialConfig

    if bool(score_url) != bool(score_model):
        raise typer.BadParameter("--score-url and --score-model go together")
    asked = "" if verification is Verification.task else str(verification)
    run.audit(
        tasks,
        sandbox=str(sandbox),
        endpoints=endpoints,
        jobs=jobs,
        out=out,
        config=TrialConfig(verification=asked, agent_timeout_s=agent_timeout_s),
        endpoint=Endpoint(url=score_url, model=score_model, key=score_key) if score_url else None,
    )


trajectories = typer.Typer(no_args_is_help=True, help="Recorded episodes.")
app.add_typer(trajectories, name="trajectory")


@trajectories.command("show")
def trajectory_show(
    path: Annotated[str, typer.Argument(help="A trajectory's directory, finished or not.")],
    tokenizer: Annotated[
        str, typer.Option(help="A checkpoint or tokenizer.json, for text instead of ids.")
    ] = "",
    turns: Annotated[str, typer.Option(help="FIRST:LAST, which turns' tokens; all if empty.")] = "",
    context_characters: Annotated[
        int, typer.Option(min=2, help="How much of each stretch of given text.")
    ] = 600,
) -> None:
    """Print a trajectory: masks, log-probs, routes, boundaries."""
    from t1jax.trajectory.show import show

    show(path, tokenizer=tokenizer, turns=turns, context_characters=context_characters)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Runs the command line and ends the process with the status of its outcome."""
    options = Options()
    try:
        with raised_on_signals():
            app(obj=options)
    except Interrupted:
        print("error: interrupted; what was being written is removed", file=sys.stderr)
        raise
    except Exception as error:
        if options.traceback or not errors.is_expected(error):
            traceback.print_exc()
        print(f"error: {errors.one_line(error)}", file=sys.stderr)
        sys.exit(errors.exit_status(error))
