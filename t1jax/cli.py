"""The `t1jax` command: each command parses its arguments and makes one call, nothing else.

What a command calls is imported inside it, so that `t1jax --help` needs neither jax nor a file.
Exit statuses: 0 done, 1 failed (the reason is the last line of stderr), 2 bad usage,
75 preempted (the same command goes on).
"""

import dataclasses
import enum
import re
import sys
import traceback
from typing import Annotated

import typer

from t1jax import __version__, errors

app = typer.Typer(
    name="t1jax",
    help="Agentic reinforcement learning of Qwen3.5-MoE in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

UNIT_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Dtype(enum.StrEnum):
    """What weights and activations are held in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class OnMissing(enum.StrEnum):
    """What replay does at a position whose routes were not recorded (a row of -1)."""

    live = "live"
    error = "error"


@dataclasses.dataclass(kw_only=True)
class Options:
    """Options of `t1jax` itself, filled while typer parses."""

    traceback: bool = False


def size_in_bytes(text: str) -> int:
    """Reads 5GB, 500MB or a plain count of bytes; units are powers of 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B|)", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write for example 5GB or 500MB")
    count_bytes = int(float(match[1]) * UNIT_BYTES[match[2].upper()])
    if count_bytes == 0:
        raise typer.BadParameter(f"{text!r} is zero bytes; write for example 5GB or 500MB")
    return count_bytes


Mesh = Annotated[str, typer.Option(help="Devices along each axis, e.g. data=2,expert=4.")]


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


@app.command()
def export(
    src: Annotated[str, typer.Argument(help="A t1jax checkpoint.")],
    dst: Annotated[str, typer.Argument(help="Where the Hugging Face directory goes.")],
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Leave out the vision and MTP tensors.")
    ] = False,
    max_shard_size: Annotated[
        int, typer.Option(parser=size_in_bytes, metavar="SIZE", help="Largest file, e.g. 5GB.")
    ] = "5GB",  # type: ignore[assignment]  # typer parses the default too
) -> None:
    """Make a Hugging Face checkpoint from a t1jax one."""
    from t1jax.checkpoint.export import export

    export(src, dst, text_only=text_only, max_shard_bytes=max_shard_size)


@app.command()
def init_tiny(
    dst: Annotated[str, typer.Argument(help="Where the Hugging Face directory goes.")],
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    size: Annotated[str, typer.Option(help="Which small model.")] = "tiny",
) -> None:
    """Write a small random checkpoint in the published layout."""
    from t1jax.checkpoint.init_tiny import init_tiny

    init_tiny(dst, seed=seed, size=size)


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
def demo(
    out: Annotated[str, typer.Argument(help="Directory for what the demo makes.")],
) -> None:
    """Make, convert and score a tiny model."""
    from t1jax.demo import demo

    demo(out)


sandboxes = typer.Typer(no_args_is_help=True, help="What sandboxes share.")
app.add_typer(sandboxes, name="sandbox")


@sandboxes.command("clean")
def sandbox_clean(
    endpoints: Annotated[
        str, typer.Option(help="Engines, comma-separated; DOCKER_HOST or the local one if empty.")
    ] = "",
    run: Annotated[str, typer.Option(help="Remove all of this run, even if it still lives.")] = "",
    older_than_h: Annotated[
        float, typer.Option(min=0, help="Also what any host made more than so many hours ago.")
    ] = 0.0,
) -> None:
    """Remove containers and control groups that killed runs left behind."""
    import asyncio

    from sandbox.janitor import clean

    cleaned = asyncio.run(
        clean(endpoints=endpoints, run_id=run, older_than_s=older_than_h * 3600)
    )
    print(f"removed {cleaned.containers} containers and {cleaned.groups} control groups; "
          f"{cleaned.kept} containers belong to live runs or other hosts")  # fmt: skip


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Runs the command line and ends the process with the status of its outcome."""
    options = Options()
    try:
        app(obj=options)
    except KeyboardInterrupt:
        sys.exit("error: interrupted")
    except Exception as error:
        if options.traceback or not errors.is_expected(error):
            traceback.print_exc()
        print(f"error: {errors.one_line(error)}", file=sys.stderr)
        sys.exit(errors.exit_status(error))
