"""`t1jax score`: log-probs and live routes of given tokens, or log-probs under given routes.

| file | tensor | shape | |
|---|---|---|---|
| INPUT | input_ids | [B, S] | any integers |
| | lengths | [B] | real tokens of each row, from its beginning |
| | routed_experts | [B, S, L, K] | for replay; a row of -1 is missing |
| OUTPUT | logprobs | [B, S-1] | float32, of token t+1 given those up to t; 0 beyond the length |
| | routed_experts | [B, S, L, K] | int16, what the router alone picks; -1 beyond the length |
| | logits | [B, S, V] | float32, when asked for; 0 beyond the length |

Column t of the routes is token t's as an input: no log-probability depends on the last token's.

Not covered: several hosts, packed rows, output on object stores.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

import t1jax
from t1jax.checkpoint.restore import open_checkpoint
from t1jax.checkpoint.tensor_files import read_json
from t1jax.errors import UserError
from t1jax.model.config import ModelConfig, from_huggingface
from t1jax.model.execution import Execution, default_execution
from t1jax.model.qwen3_5 import Params, Qwen3_5, bind
from t1jax.model.sharding import axis_size, make_mesh
from t1jax.score.batches import Batch, Bucket, Routes, arrange, placed
from t1jax.score.inputs import Tokens, read_input
from t1jax.score.output import Writer, output_shapes, written_aside
from t1jax.score.progress import progress

UNIT = {"tpu": 128}  # splash attention wants blocks of 128 positions;
OTHER_UNIT = 64  # elsewhere one chunk of the delta net
ON_MISSING = ("live", "error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What was scored. `tokens` are inputs; a row of n of them has n-1 log-probabilities."""

    rows: int
    tokens: int
    scored: int
    logprob_sum: float
    not_finite: int  # log-probabilities left out of the mean
    seconds: float  # of the passes, compilation included
    programs: int
    recorded: int  # (token, layer) rows that were replayed
    replaced: int  # of those, where the live router would have picked another set

    @property
    def mean_logprob(self) -> float:
        """Over finite log-probabilities; NaN where there is none."""
        counted = self.scored - self.not_finite
        return self.logprob_sum / counted if counted else math.nan

    @property
    def replay_replace_rate(self) -> float:
        """The share of replayed rows where the live top-K set differs; NaN without replay."""
        return self.replaced / self.recorded if self.recorded else math.nan

    def lines(self) -> list[str]:
        """The summary as a person reads it."""
        lines = [
            f"rows: {self.rows:,}",
            f"tokens: {self.tokens:,}",
            f"mean log-prob: {self.mean_logprob:.6f} over {self.scored - self.not_finite:,} tokens",
            f"tokens/s: {self.tokens / max(self.seconds, 1e-9):,.0f} "
            f"({self.seconds:.1f} s, first runs of {self.programs} programs included)",
        ]
        if self.not_finite:
            lines.append(f"log-probs that are not finite: {self.not_finite:,}")
        if self.recorded:
            lines.append(
                f"replay_replace_rate: {self.replay_replace_rate:.6f} "
                f"({self.replaced:,} of {self.recorded:,} recorded rows)"
            )
        return lines


def score(
    checkpoint: str,
    input: str,
    output: str,
    *,
    replay: bool = False,
    logits: bool = False,
    dtype: str = "float32",
    mesh: str = "",
    batch_tokens: int = 16384,
    on_missing: str = "live",
) -> Summary:
    """Scores INPUT's tokens, writes OUTPUT, and prints a summary.

    Args:
      checkpoint: what `t1jax convert` made, or a Hugging Face directory.
      input: a safetensors file, see the module.
      output: a file, replaced if it exists.
      replay: send tokens to INPUT's routed_experts instead of the router's choice.
      logits: write logits too.
      dtype: float32 or bfloat16, of weights and activations.
      mesh: devices along each axis, "data=2,expert=4"; empty: one device.
      batch_tokens: most tokens in a pass, padding included; but a row is never split, and every
        part of the mesh's rows gets at least one.
      on_missing: with replay, "live" lets the router choose where no route was recorded, "error"
        refuses such a place unless it is a row's last token.

    Raises:
      UserError: INPUT, the mesh or an argument is not as described; nothing is written then.
    """
    if batch_tokens < 1 or on_missing not in ON_MISSING:
        raise UserError(
            f"batch_tokens={batch_tokens}, on_missing={on_missing!r}; expected a positive number "
            f"and one of {ON_MISSING}"
        )
    config = _read_config(checkpoint)
    tokens = read_input(input, config, replay=replay, on_missing=on_missing)
    devices = _make_mesh(mesh)
    run = default_execution(devices, dtype=dtype)
    buckets = arrange(
        tokens.lengths, batch_tokens=batch_tokens, row_parts=axis_size(devices, "rows"),
        unit=math.lcm(UNIT.get(jax.default_backend(), OTHER_UNIT), axis_size(devices, "positions")),
    )  # fmt: skip
    shapes = output_shapes(tokens.ids.shape, config, logits)
    metadata = {
        "t1jax": t1jax.__version__, "checkpoint": str(checkpoint), "input": str(input),
        "dtype": dtype, "mesh": mesh, "replay": json.dumps(replay), "on_missing": on_missing,
    }  # fmt: skip
    model = Qwen3_5(config)
    with written_aside(output, input, shapes, metadata) as writer:
        _, params = open_checkpoint(checkpoint, model, devices, dtype)
        step = make_step(config, run, with_logits=logits)
        tally = Tally(tokens, writer)
        summary = _score_all(step, params, tokens, buckets, tally, config, run)
    if replay and not summary.recorded:
        print("replay: no row is recorded; the live router chose everywhere")
    print("\n".join(summary.lines()))
    return summary


def _read_config(checkpoint: str) -> ModelConfig:
    """Sizes alone, so that INPUT is checked before weights are read."""
    file = epath.Path(checkpoint) / "config.json"
    if file.exists():
        return from_huggingface(read_json(file))
    return open_checkpoint(checkpoint)[0]  # says what is missing


def _make_mesh(shape: str) -> jax.sharding.Mesh:
    try:
        return make_mesh(shape)
    except ValueError as error:
        raise UserError(str(error)) from None


# ---- passes --------------------------------------------------------------------------------------


class Scored(NamedTuple):
    """Results of a pass, on the device."""

    logprobs_BT: jax.Array  # column t: of token t+1
    live_routes_LBTC: jax.Array
    logits_BTV: jax.Array | None


Step = Callable[..., Scored]


@functools.cache  # a process that scores again with the same sizes traces and compiles nothing
def make_step(config: ModelConfig, run: Execution, *, with_logits: bool) -> Step:
    """The jitted pass: (params, tokens, valid, replay, plans) -> Scored."""
    model = Qwen3_5(config)

    @functools.partial(jax.jit, compiler_options=run.compiler_options)
    def step(params: Params, tokens_BT: Any, valid_BT: Any, replay: Any, plans: Any) -> Scored:
        bound: Any = bind(model, params)
        out = bound(tokens_BT, segments_BT=valid_BT, run=run, replay=replay, plans=plans)
        next_BT = jnp.pad(tokens_BT[:, 1:], ((0, 0), (0, 1)))
        logprobs_BT = bound.head.logprobs(out.hidden_BTD, next_BT, run)
        logits_BTV = bound.head(out.hidden_BTD, run).astype(jnp.float32) if with_logits else None
        return Scored(logprobs_BT, out.live_routes_LBTC, logits_BTV)

    return step


class Tally:
    """Takes finished passes: writes their rows and adds up what the summary says."""

    def __init__(self, tokens: Tokens, writer: Writer):
        self._tokens, self._writer = tokens, writer
        self.scored = self.not_finite = self.recorded = self.replaced = 0
        self.logprob_sum = 0.0

    def add(self, batch: Batch, result: Scored) -> int:
        """Waits for the pass; returns how many tokens it scored."""
        fetched = jax.tree.map(np.asarray, result)
        for i, row in enumerate(batch.members.tolist()):
            length = int(self._tokens.lengths[row])
            logprobs_T = fetched.logprobs_BT[i, : length - 1]
            live_LTC = fetched.live_routes_LBTC[:, i, :length]
            self._add_logprobs(row, logprobs_T)
            if batch.routes is not None:
                routes = Routes(*(x[:, i, :length] for x in batch.routes))
                self._compare(routes, live_LTC)
            self._writer.write("logprobs", row, logprobs_T)
            self._write_routes(row, live_LTC)
            if fetched.logits_BTV is not None:
                self._writer.write("logits", row, fetched.logits_BTV[i, :length])
        return int(self._tokens.lengths[batch.members].sum())

    def add_empty(self, layers: int, chosen: int) -> None:
        """Writes the rows that no pass has: those of length 0."""
        for row in np.flatnonzero(self._tokens.lengths == 0).tolist():
            self._write_routes(row, np.zeros((layers, 0, chosen), np.int16))

    def _add_logprobs(self, row: int, logprobs_T: np.ndarray) -> None:
        if len(lost := np.flatnonzero(np.isnan(logprobs_T))):
            raise UserError(
                f"the log-prob of row {row}, token {lost[0] + 1} is not a number: the checkpoint "
                "holds NaN or the dtype overflows; nothing is written, for its routes mean nothing"
            )
        finite_T = np.isfinite(logprobs_T)
        self.scored += len(logprobs_T)
        self.not_finite += int((~finite_T).sum())
        self.logprob_sum += float(logprobs_T[finite_T].sum(dtype=np.float64))

    def _compare(self, routes: Routes, live_LTC: np.ndarray) -> None:
        forced_LTC, recorded_LT = np.sort(routes.ids_LBTC, axis=-1), routes.recorded_LBT
        differs_LT = (forced_LTC != np.sort(live_LTC, axis=-1)).any(axis=-1)
        self.recorded += int(recorded_LT.sum())
        self.replaced += int((differs_LT & recorded_LT).sum())

    def _write_routes(self, row: int, live_LTC: np.ndarray) -> None:
        layers, length, chosen = live_LTC.shape
        whole = np.full((self._tokens.ids.shape[1], layers, chosen), -1, np.int16)
        whole[:length] = np.moveaxis(live_LTC, 1, 0)
        self._writer.write("routed_experts", row, whole)


def _score_all(
    step: Step,
    params: Params,
    tokens: Tokens,
    buckets: list[Bucket],
    tally: Tally,
    config: ModelConfig,
    run: Execution,
) -> Summary:
    """All passes; the host takes one in while the device works on the next."""
    total, started_s = int(tokens.lengths.sum()), time.monotonic()
    waiting: tuple[Batch, Scored] | None = None
    with progress(total) as advance:
        for batch, arguments in (x for b in buckets for x in placed(tokens, b, config, run)):
            result = step(params, *arguments)
            if waiting is not None:
                advance(tally.add(*waiting))
            waiting = batch, result
        if waiting is not None:
            advance(tally.add(*waiting))
    tally.add_empty(config.layers, config.moe.chosen)
    return Summary(
        rows=len(tokens.lengths), tokens=total, scored=tally.scored,
        logprob_sum=tally.logprob_sum, not_finite=tally.not_finite,
        seconds=time.monotonic() - started_s, programs=len(buckets),
        recorded=tally.recorded, replaced=tally.replaced,
    )  # fmt: skip
