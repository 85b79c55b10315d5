"""`t1jax sample`: continuations of prompts, one JSON line each, in the order of the prompts.

| line of PROMPTS | | if not given |
|---|---|---|
| prompt or prompt_ids | text (special tokens are recognised), or token ids | |
| max_tokens | most tokens to sample | 256 |
| temperature, top_p, top_k | as in t1jax/sampling/sampler | 1, 1, 0 |
| seed | the same seed and prompt give the same tokens | the prompt's number, from 0 |

A line of OUTPUT has `prompt_ids`, `ids`, `text`, `logprobs` (raw), `filtered_logprobs`, `finish`
and `routes`: the name of a tensor [tokens - 1, L, C] in OUTPUT.routes.safetensors, whose row t are
the experts that token t of prompt_ids + ids visited. The tokens of the checkpoint's
generation_config.json that end a text end a continuation.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from etils import epath
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from t1jax.config import SamplerSection
from t1jax.errors import UserError
from t1jax.sampling.open import load_weights, scheduler
from t1jax.trajectory.completion import Completion, Request, RequestError
from t1jax.trajectory.record import Sampling

ENDS = ("generation_config.json", "config.json")  # where a checkpoint says what ends a text


class Line(BaseModel):
    """A line of PROMPTS."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    prompt: str | None = None
    prompt_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 256
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None


def sample(
    checkpoint: str,
    prompts: str,
    output: str,
    *,
    mesh: str = "",
    dtype: str = "float32",
    slots: int = 16,
    prefill_chunk: int = 512,
    steps_per_round: int = 4,
) -> None:
    """Continues every prompt, writes OUTPUT and its routes, and prints a summary.

    Args:
      checkpoint: what `t1jax convert` made, or a Hugging Face directory.
      prompts: a JSON Lines file, see the module.
      output: a file, replaced if it exists.
      mesh: devices along each axis; empty: one device.
      dtype: of weights and activations.
      slots: prompts that are continued together.
      prefill_chunk: most prompt tokens that are read at once.
      steps_per_round: decode steps between two looks at the queue, where nobody waits.

    Raises:
      UserError: a line, named by its number, or an argument is not as described; nothing is
        written then.
    """
    _refuse_place(output, prompts)
    tokenizer = _tokenizer(checkpoint)
    lines = read_prompts(prompts, tokenizer, stops=_ends(checkpoint))
    requests = list(lines.values())
    longest = max(len(r.prompt) + r.max_tokens for r in requests)
    options = SamplerSection(
        slots=slots, context=max(longest, 16), prefill_chunk=prefill_chunk, cache_mb=0,
        steps_per_round=steps_per_round, waiting=len(requests),
    )  # fmt: skip
    weights = load_weights(checkpoint, mesh, dtype)
    began_s = time.monotonic()
    answers = asyncio.run(_answer_all(prompts, lines, weights, options, mesh, dtype))
    _write(output, requests, answers, tokenizer)
    tokens, seconds = sum(len(a.ids) for a in answers), time.monotonic() - began_s
    print(f"prompts: {len(requests):,}\ntokens: {tokens:,}")
    print(f"tokens/s: {tokens / seconds:,.0f} ({seconds:.1f} s, compilation included)")


async def _answer_all(
    path: str,
    lines: Mapping[int, Request],
    weights: Any,
    options: SamplerSection,
    mesh: str,
    dtype: str,
) -> list[Completion]:
    async with scheduler(weights, options, mesh=mesh, dtype=dtype) as ours:
        with _progress(len(lines)) as advance:

            async def answer(number: int, request: Request) -> Completion:
                try:
                    completion = await ours.complete(request)
                except RequestError as error:
                    raise UserError(f"{path}, line {number}: {error}") from None
                advance(len(completion.ids))
                return completion

            return await asyncio.gather(*(answer(*numbered) for numbered in lines.items()))


# ---- input --------------------------------------------------------------------------------------


def read_prompts(
    path: str, tokenizer: Tokenizer | None, *, stops: frozenset[int] = frozenset()
) -> dict[int, Request]:
    """The requests of a file by line, counted from 1; a wrong one is named by its line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"{path} holds no line; expected a JSON object on each")
    requests: dict[int, Request] = {}
    for i, line in numbered:
        try:
            read = Line.model_validate_json(line)
            requests[i] = _request(read, len(requests), tokenizer, stops)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise UserError(f"{path}, line {i}: {where}: {first['msg']}") from None
        except UserError as error:
            raise UserError(f"{path}, line {i}: {error}") from None
    return requests


def _request(
    line: Line, number: int, tokenizer: Tokenizer | None, stops: frozenset[int]
) -> Request:
    if (line.prompt is None) == (line.prompt_ids is None):
        raise UserError("expected either prompt or prompt_ids")
    if line.prompt_ids is not None:
        ids = line.prompt_ids
    elif tokenizer is None:
        raise UserError("prompt needs the checkpoint's tokenizer.json, which it lacks; give ids")
    else:
        ids = tokenizer.encode(line.prompt, add_special_tokens=False).ids
    if not ids:
        raise UserError("the prompt has no token; expected at least one")
    seed = number if line.seed is None else line.seed
    return Request(
        prompt=np.asarray(ids, np.int32), max_tokens=line.max_tokens, stop_ids=stops,
        sampling=Sampling(
            temperature=line.temperature, top_p=line.top_p, top_k=line.top_k, seed=seed
        ),
    )  # fmt: skip


def _tokenizer(checkpoint: str) -> Tokenizer | None:
    file = epath.Path(checkpoint) / "tokenizer.json"
    return Tokenizer.from_str(file.read_text()) if file.exists() else None


def _ends(checkpoint: str) -> frozenset[int]:
    """The ids that end a text, by the first of the checkpoint's files that says so."""
    for name in ENDS:
        file = epath.Path(checkpoint) / name
        text = file.read_text() if file.exists() else ""
        ends = json.loads(text).get("eos_token_id") if text.strip() else None
        if ends is not None:
            return frozenset(ends if isinstance(ends, list) else [ends])
    return frozenset()


# ---- output -------------------------------------------------------------------------------------


def routes_path(output: str) -> Path:
    """Where the routes of an OUTPUT are."""
    return Path(f"{output}.routes.safetensors")


def _refuse_place(output: str, prompts: str) -> None:
    path = Path(output)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{output} cannot be written: expected a file in an existing directory")
    if path.exists() and Path(prompts).exists() and path.samefile(prompts):
        raise UserError(f"{output} is the input; choose another file for the output")


def _write(
    output: str, requests: Sequence[Request], answers: Sequence[Completion],
    tokenizer: Tokenizer | None,
) -> None:  # fmt: skip
    """Both files aside, then in place: the routes first, so that OUTPUT's names exist."""
    routes = routes_path(output)
    with _aside(routes) as work:
        save_file({str(i): answer.routes for i, answer in enumerate(answers)}, work)
    with _aside(Path(output)) as work, work.open("w", encoding="utf-8") as stream:
        for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            ids = answer.ids.tolist()
            line = {
                "prompt_ids": request.prompt.tolist(),
                "ids": ids,
                "text": None if tokenizer is None else tokenizer.decode(ids, False),
                "logprobs": _plain(answer.logprobs),
                "filtered_logprobs": _plain(answer.filtered_logprobs),
                "finish": str(answer.finish),
                "routes": str(i),
            }
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")


def _plain(values: np.ndarray) -> list[float]:
    """float32 as the shortest decimals that read back as the same float32."""
    return [float(str(value)) for value in values]


@contextlib.contextmanager
def _aside(path: Path) -> Iterator[Path]:
    work = path.with_name(f"{path.name}.incomplete")
    try:
        yield work
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)


@contextlib.contextmanager
def _progress(total: int, every_s: float = 5.0) -> Iterator[Callable[[int], None]]:
    """Prompts done and tokens a second on stderr: a bar on a terminal, else now and then a line."""
    started_s = shown_s = time.monotonic()
    done = tokens = 0
    columns = (TextColumn("sample"), BarColumn(), MofNCompleteColumn(),
               TextColumn("{task.fields[rate]}"), TimeRemainingColumn())  # fmt: skip
    on_terminal = sys.stderr.isatty()
    bars = Progress(*columns, console=Console(file=sys.stderr), disable=not on_terminal)
    task = bars.add_task("sample", total=total, rate="")

    def advance(sampled: int) -> None:
        nonlocal done, tokens, shown_s
        done, tokens = done + 1, tokens + sampled
        rate = f"{tokens / max(time.monotonic() - started_s, 1e-9):,.0f} tokens/s"
        bars.update(task, completed=done, rate=rate)
        if not on_terminal and time.monotonic() - shown_s >= every_s:
            shown_s = time.monotonic()
            print(f"sample: {done:,} of {total:,}, {rate}", file=sys.stderr, flush=True)

    with bars:
        yield advance
