"""`t1jax score`: log-probabilities and live routes of given tokens, and with `replay` under recorded
routes.

    INPUT    input_ids [B, S], lengths [B]; for replay routed_experts [B, S, L, K], rows of -1 missing
    OUTPUT   logprobs float32 [B, S-1]: of token t+1 given the tokens up to t; 0 beyond a row's length
             routed_experts int16 [B, S, L, K]: what the router alone picks, -1 beyond the length
             logits float32 [B, S, V], when asked for

Column t of the routes belongs to token t as an input, so the last token has a row that no
log-probability depends on. What stands beyond a row's length in INPUT is never read.

Rows of similar length share one program: see `arrange`. Not covered: several hosts, and packing.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from safetensors import SafetensorError, safe_open

import t1jax
from t1jax.checkpoint.restore import open_checkpoint
from t1jax.checkpoint.tensor_files import read_json
from t1jax.errors import UserError
from t1jax.model.config import ModelConfig, from_huggingface
from t1jax.model.execution import Execution, default_execution
from t1jax.model.moe import Plan, Replay, plan_dispatch
from t1jax.model.qwen3_5 import Qwen3_5, bind
from t1jax.model.sharding import RULES, axis_size, make_mesh, spec

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
    shapes = output_shapes(tokens, config, logits)
    metadata = {
        "t1jax": t1jax.__version__, "checkpoint": str(checkpoint), "input": str(input),
        "dtype": dtype, "mesh": mesh, "replay": json.dumps(replay), "on_missing": on_missing,
    }  # fmt: skip
    model = Qwen3_5(config)
    with written_aside(output, input, shapes, metadata) as writer:
        _, params = open_checkpoint(checkpoint, model, devices, dtype)
        step = make_step(model, run, with_logits=logits)
        summary = _run(step, params, tokens, buckets, writer, config, run)
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
        needs = re.search(r"needs (\d+) devices", str(error))
        hint = f"; on CPU set XLA_FLAGS=--xla_force_host_platform_device_count={needs[1]}"
        raise UserError(f"{error}{hint if needs else ''}") from None


# ---- input ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tokens:
    """INPUT, checked. Routes stay in the file and are read row by row."""

    ids: np.ndarray  # [B, S], any integer dtype
    lengths: np.ndarray  # [B] int64
    routes: Any  # a safetensors slice [B, S, L, K], or None

    def routes_of(self, row: int) -> np.ndarray:
        """[length, L, K], as recorded."""
        return self.routes[row : row + 1, : int(self.lengths[row])][0]


def read_input(path: str, config: ModelConfig, *, replay: bool, on_missing: str) -> Tokens:
    """Opens INPUT and refuses what the model cannot have seen, naming the first place."""
    try:
        file = safe_open(path, framework="numpy")
    except (SafetensorError, FileNotFoundError, IsADirectoryError) as error:
        raise UserError(f"{path} is no readable safetensors file: {error}") from None
    wanted = ["input_ids", "lengths"] + ["routed_experts"] * replay
    missing = sorted(set(wanted) - set(file.keys()))
    if missing:
        raise UserError(
            f"{path} has no {', '.join(missing)}; it holds {sorted(file.keys())} and "
            f"{'replay' if replay else 'score'} needs {wanted}"
        )
    slices = {name: file.get_slice(name) for name in wanted}
    shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
    for name, part in slices.items():
        if not re.fullmatch(r"[IU]\d+", part.get_dtype()):
            raise UserError(f"{path}: {name} has dtype {part.get_dtype()}; expected integers")
    _check_shapes(path, shapes, config)
    ids, lengths = file.get_tensor("input_ids"), file.get_tensor("lengths")
    _check_lengths(path, lengths, ids.shape[1])
    tokens = Tokens(ids, lengths.astype(np.int64), slices.get("routed_experts"))
    _check_ids(path, tokens, config.vocab)
    if replay:
        for row in range(len(ids)):
            _check_routes(path, tokens, row, config.moe.experts, on_missing)
    elif "routed_experts" in file.keys():  # noqa: SIM118 - safe_open is no mapping
        print(f"{path}: routed_experts are not used without --replay", file=sys.stderr)
    return tokens


def _check_shapes(path: str, shapes: dict[str, tuple[int, ...]], config: ModelConfig) -> None:
    if len(shapes["input_ids"]) != 2:
        raise UserError(f"{path}: input_ids has shape {shapes['input_ids']}; expected [B, S]")
    B, S = shapes["input_ids"]
    expected = {"lengths": (B,), "routed_experts": (B, S, config.layers, config.moe.chosen)}
    for name, shape in expected.items():
        if shapes.get(name, shape) == shape:
            continue
        hint = ""
        if name == "routed_experts" and shapes[name] == (*shape[:2], shape[3], shape[2]):
            hint = ": the last two axes are swapped, they are [layer, choice]"
        if name == "routed_experts" and shapes[name] == (B, S - 1, *shape[2:]):
            hint = ": add a row of -1 for each last token"
        raise UserError(f"{path}: {name} has shape {shapes[name]}; expected {shape}{hint}")


def _check_lengths(path: str, lengths: np.ndarray, S: int) -> None:
    bad = np.flatnonzero((lengths < 0) | (lengths > S))
    if bad.size:
        raise UserError(
            f"{path}: row {bad[0]} has length {lengths[bad[0]]}; input_ids has room for 0..{S}"
        )
    if not lengths.any():
        raise UserError(f"{path} has {len(lengths)} rows and no token in them; nothing to score")


def _check_ids(path: str, tokens: Tokens, vocab: int) -> None:
    real = np.arange(tokens.ids.shape[1]) < tokens.lengths[:, None]
    bad = np.argwhere(real & ((tokens.ids < 0) | (tokens.ids >= vocab)))
    if bad.size:
        row, position = bad[0]
        raise UserError(
            f"{path}: row {row}, position {position} is token {tokens.ids[row, position]}; the "
            f"vocabulary has 0..{vocab - 1} ({len(bad)} such tokens in all)"
        )


def _check_routes(path: str, tokens: Tokens, row: int, experts: int, on_missing: str) -> None:
    """Refuses one row's routes that no router chose."""
    ids_TLC = tokens.routes_of(row)
    absent_TLC = ids_TLC == -1
    ordered = np.sort(ids_TLC, axis=-1)
    missing = absent_TLC.all(axis=-1)
    refused = {
        "holds -1 beside experts: a row is recorded or missing as a whole": (
            absent_TLC.any(axis=-1) & ~missing
        ),
        f"names an expert outside 0..{experts - 1}": (
            ((ids_TLC < 0) | (ids_TLC >= experts)).any(axis=-1) & ~missing
        ),
        "names an expert twice": (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1) & ~missing,
    }
    if on_missing == "error":
        # The last token is never an input of a step that recorded it, and carries no loss.
        inputs = np.arange(len(missing))[:, None] < len(missing) - 1
        refused["is missing; --on-missing live lets the router choose there"] = missing & inputs
    for what, places in refused.items():
        if places.any():
            token, layer = np.argwhere(places)[0]
            raise UserError(
                f"{path}: routed_experts row {row}, token {token}, layer {layer} "
                f"{ids_TLC[token, layer].tolist()} {what} ({places.sum()} such in this row)"
            )


# ---- batches -------------------------------------------------------------------------------------


class Bucket(NamedTuple):
    """Rows that one program scores, in batches of `rows` rows padded to `size` positions."""

    size: int
    rows: int
    batches: list[np.ndarray]  # numbers of INPUT's rows, at most `rows` each


def padded_length(length: int, unit: int) -> int:
    """`length` rounded up to one of 8 sizes per doubling, all multiples of `unit`."""
    units = -(-length // unit)
    step = 2 ** max(math.ceil(math.log2(units)) - 4, 0)
    return -(-units // step) * step * unit


def arrange(
    lengths: np.ndarray, *, batch_tokens: int, row_parts: int, unit: int
) -> list[Bucket]:
    """Sorts rows into buckets of like length, longest first: memory runs out at once or never.

    Batches of a bucket have equal shapes, so that it is one program; their rows are as few as hold
    the bucket evenly, in multiples of `row_parts`. Rows of length 0 are in no bucket.
    """
    rows_by_length = np.argsort(lengths, kind="stable")
    by_size: dict[int, list[int]] = {}
    for row in rows_by_length[::-1]:
        if lengths[row] > 0:
            by_size.setdefault(padded_length(int(lengths[row]), unit), []).append(int(row))
    buckets = []
    for size, members in by_size.items():
        most = max(batch_tokens // size // row_parts, 1) * row_parts
        count = -(-len(members) // most)
        rows = -(-len(members) // (count * row_parts)) * row_parts
        batches = [np.array(members[i : i + rows]) for i in range(0, len(members), rows)]
        buckets.append(Bucket(size, rows, batches))
    return buckets


class Batch(NamedTuple):
    """What a pass takes, on the host; routes are None without replay."""

    tokens_BT: np.ndarray
    valid_BT: np.ndarray
    ids_LBTC: np.ndarray | None
    recorded_LBT: np.ndarray | None


def fill(tokens: Tokens, members: np.ndarray, bucket: Bucket, config: ModelConfig) -> Batch:
    """Copies rows of INPUT into padded arrays."""
    B, T, L, C = bucket.rows, bucket.size, config.layers, config.moe.chosen
    tokens_BT = np.zeros((B, T), np.int32)
    valid_BT = np.zeros((B, T), np.int32)
    replay = tokens.routes is not None
    ids_LBTC = np.zeros((L, B, T, C), config.route_dtype) if replay else None
    recorded_LBT = np.zeros((L, B, T), bool) if replay else None
    for i, row in enumerate(members):
        length = int(tokens.lengths[row])
        tokens_BT[i, :length] = tokens.ids[row, :length]
        valid_BT[i, :length] = 1
        if ids_LBTC is not None and recorded_LBT is not None:
            ids_TLC = tokens.routes_of(row)
            recorded_TL = (ids_TLC != -1).any(axis=-1)
            recorded_LBT[:, i, :length] = recorded_TL.T
            ids_TLC = np.where(recorded_TL[..., None], ids_TLC, 0)
            ids_LBTC[:, i, :length] = np.moveaxis(ids_TLC, 1, 0)
    return Batch(tokens_BT, valid_BT, ids_LBTC, recorded_LBT)


def is_complete(tokens: Tokens, bucket: Bucket) -> bool:
    """Whether every route of the bucket is recorded, those of last tokens included."""
    return all(
        bool((tokens.routes_of(row) != -1).all()) for members in bucket.batches for row in members
    )


# ---- passes --------------------------------------------------------------------------------------


class Scored(NamedTuple):
    """Results of a pass, on the device."""

    logprobs_BT: jax.Array  # column t: of token t+1
    live_routes_LBTC: jax.Array
    logits_BTV: jax.Array | None


def make_step(model: Qwen3_5, run: Execution, *, with_logits: bool):
    """The jitted pass: (params, tokens, valid, replay, plans) -> Scored."""

    @jax.jit
    def step(params, tokens_BT, valid_BT, replay, plans) -> Scored:
        bound = bind(model, params)
        out = bound(tokens_BT, segments_BT=valid_BT, run=run, replay=replay, plans=plans)
        next_BT = jnp.pad(tokens_BT[:, 1:], ((0, 0), (0, 1)))
        logprobs_BT = bound.head.logprobs(out.hidden_BTD, next_BT, run)
        logits_BTV = bound.head(out.hidden_BTD, run).astype(jnp.float32) if with_logits else None
        return Scored(logprobs_BT, out.live_routes_LBTC, logits_BTV)

    return step


class _Counts:
    """Sums over what was fetched."""

    def __init__(self) -> None:
        self.scored = self.not_finite = self.recorded = self.replaced = 0
        self.logprob_sum = 0.0


def _run(step, params, tokens, buckets, writer, config, run) -> Summary:
    """All passes; the host fetches one while the device works on the next."""
    counts, started_s = _Counts(), time.monotonic()
    with progress(int(tokens.lengths.sum())) as advance:
        for row in np.flatnonzero(tokens.lengths == 0):
            writer.write(row, 0, _nothing(tokens, config), None, None)
        waiting = None
        for bucket in buckets:
            for members, batch, routed in _prepared(tokens, bucket, config, run):
                tokens_BT = _put(batch.tokens_BT, run, "rows", "positions")
                valid_BT = _put(batch.valid_BT, run, "rows", "positions")
                result = step(params, tokens_BT, valid_BT, *routed)
                if waiting is not None:
                    advance(_fetch(*waiting, tokens, writer, counts))
                waiting = (members, batch, result)
        advance(_fetch(*waiting, tokens, writer, counts))
    return Summary(
        rows=len(tokens.lengths), tokens=int(tokens.lengths.sum()), programs=len(buckets),
        seconds=time.monotonic() - started_s, **vars(counts),
    )  # fmt: skip


def _nothing(tokens: Tokens, config: ModelConfig) -> np.ndarray:
    shape = (tokens.ids.shape[1], config.layers, config.moe.chosen)
    return np.full(shape, -1, np.int16)


def _put(x: np.ndarray, run: Execution, *axes: str | None) -> jax.Array:
    return jax.device_put(x, NamedSharding(run.mesh, spec(*axes)))


def _prepared(
    tokens: Tokens, bucket: Bucket, config: ModelConfig, run: Execution
) -> Iterator[tuple[np.ndarray, Batch, tuple[Replay | None, Plan | None]]]:
    """The bucket's batches with their replay: all with plans of one shape, or all with a mask."""
    complete = tokens.routes is not None and is_complete(tokens, bucket)
    filled = lambda members: fill(tokens, members, bucket, config)  # noqa: E731
    if complete:
        plan = lambda batch: plan_dispatch(  # noqa: E731
            batch.ids_LBTC, batch.valid_BT > 0, config.moe.experts, run.mesh, run.dispatch
        )
        # Planning twice costs less than compiling twice, and holding all plans too much memory.
        room = max((plan(filled(members)).room for members in bucket.batches), default=0)
    for members in bucket.batches:
        batch = filled(members)
        if batch.ids_LBTC is None:
            yield members, batch, (None, None)
            continue
        ids_LBTC = _put(batch.ids_LBTC, run, None, "rows", "positions", None)
        if complete:
            yield members, batch, (Replay(ids_LBTC, None), _with_room(plan(batch), room, run, batch))
        else:
            recorded_LBT = _put(batch.recorded_LBT, run, None, "rows", "positions")
            yield members, batch, (Replay(ids_LBTC, recorded_LBT), None)


def _with_room(plan: Plan, room: int, run: Execution, batch: Batch) -> Plan:
    """The plan on the devices, its order filled up to `room` rows with no copy in them."""
    assert run.dispatch == "gather", "the order's length is the room of this strategy only"
    copies = batch.ids_LBTC[0].size  # of all groups; a group's own number stands for no copy
    groups = axis_size(run.mesh, "rows") // axis_size(run.mesh, "experts")
    none = copies // groups // axis_size(run.mesh, "positions")
    extra = room - plan.order_R.shape[-1]
    order_R = np.pad(plan.order_R, ((0, 0), (0, 0), (0, extra)), constant_values=none)
    shards = NamedSharding(
        run.mesh, jax.sharding.PartitionSpec(None, (*RULES["rows"], *RULES["positions"]))
    )
    put = lambda x: jax.device_put(x, shards)  # noqa: E731
    return Plan(put(order_R), put(plan.sizes_E), room)


def _fetch(members, batch: Batch, result: Scored, tokens: Tokens, writer, counts: _Counts) -> int:
    """Writes a pass's rows at their places in OUTPUT; returns how many tokens that were."""
    result = jax.tree.map(np.asarray, result)
    for i, row in enumerate(members):
        length = int(tokens.lengths[row])
        logprobs = result.logprobs_BT[i, : length - 1]
        live_LTC = result.live_routes_LBTC[:, i, :length]
        routes = np.full((tokens.ids.shape[1], len(live_LTC), live_LTC.shape[2]), -1, np.int16)
        routes[:length] = np.moveaxis(live_LTC, 0, 1)
        logits = None if result.logits_BTV is None else result.logits_BTV[i, :length]
        writer.write(row, length, routes, logprobs, logits)
        finite = np.isfinite(logprobs)
        counts.scored += len(logprobs)
        counts.not_finite += int((~finite).sum())
        counts.logprob_sum += float(logprobs[finite].sum(dtype=np.float64))
        if batch.ids_LBTC is not None and batch.recorded_LBT is not None:
            recorded_LT = batch.recorded_LBT[:, i, :length]
            forced, live = np.sort(batch.ids_LBTC[:, i, :length], axis=-1), np.sort(live_LTC, axis=-1)
            counts.recorded += int(recorded_LT.sum())
            counts.replaced += int(((forced != live).any(axis=-1) & recorded_LT).sum())
    return int(tokens.lengths[members].sum())


# ---- output --------------------------------------------------------------------------------------


def output_shapes(tokens: Tokens, config: ModelConfig, logits: bool) -> dict[str, tuple]:
    """(dtype, shape) of OUTPUT's tensors, wider ones first so that each is aligned."""
    B, S = tokens.ids.shape
    shapes: dict[str, tuple] = {"logprobs": ("F32", (B, max(S - 1, 0)))}
    if logits:
        shapes["logits"] = ("F32", (B, S, config.vocab))
    return shapes | {"routed_experts": ("I16", (B, S, config.layers, config.moe.chosen))}


class _Writer:
    """Writes rows into a safetensors file whose shapes are known; memory holds one row."""

    def __init__(self, stream, shapes: dict[str, tuple], metadata: dict[str, str]):
        self._stream = stream
        header: dict[str, Any] = {"__metadata__": metadata}
        self._rows: dict[str, tuple[int, int]] = {}  # where row 0 begins, and bytes per row
        end = 0
        for name, (dtype, shape) in shapes.items():
            row_bytes = math.prod(shape[1:]) * (2 if dtype == "I16" else 4)
            first, end = end, end + row_bytes * shape[0]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (first, end)}
            self._rows[name] = (first, row_bytes)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        stream.write(len(text).to_bytes(8, "little") + text)
        self._start = 8 + len(text)
        stream.truncate(self._start + end)  # zeros, wherever nothing is written

    def write(self, row: int, length: int, routes, logprobs, logits) -> None:
        for name, values in (("routed_experts", routes), ("logprobs", logprobs), ("logits", logits)):
            if values is not None:
                first, row_bytes = self._rows[name]
                self._stream.seek(self._start + first + int(row) * row_bytes)
                self._stream.write(np.ascontiguousarray(values).tobytes())


@contextlib.contextmanager
def written_aside(
    output: str, input: str, shapes: dict[str, tuple], metadata: dict[str, str]
) -> Iterator[_Writer]:
    """A writer of OUTPUT.incomplete, which takes OUTPUT's place when the block succeeds."""
    path = Path(output)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{output} cannot be written: expected a file in an existing directory")
    if path.exists() and path.samefile(input):
        raise UserError(f"{output} is the input; choose another file for the output")
    needed_bytes = sum(math.prod(shape) * 4 for _, shape in shapes.values())
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"{path.parent} has {free_bytes / 1e9:.1f} GB free and {output} may take "
            f"{needed_bytes / 1e9:.1f} GB"
        )
    work = path.with_name(f"{path.name}.incomplete")
    try:
        with work.open("wb") as stream:
            yield _Writer(stream, shapes, metadata)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)


# ---- progress ------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(total: int, every_s: float = 5.0) -> Iterator[Any]:
    """Tokens done and their rate on stderr: a bar on a terminal, else a line every few seconds."""
    started_s = shown_s = time.monotonic()
    done = 0
    rate = lambda: f"{done / max(time.monotonic() - started_s, 1e-9):,.0f} tokens/s"  # noqa: E731
    columns = (TextColumn("score"), BarColumn(), MofNCompleteColumn(),
               TextColumn("{task.fields[rate]}"), TimeRemainingColumn())  # fmt: skip
    on_terminal = sys.stderr.isatty()
    bars = Bars(*columns, console=Console(file=sys.stderr), disable=not on_terminal)
    task = bars.add_task("score", total=total, rate="")

    def advance(tokens: int) -> None:
        nonlocal done, shown_s
        done += tokens
        bars.update(task, completed=done, rate=rate())
        if not on_terminal and time.monotonic() - shown_s >= every_s:
            shown_s = time.monotonic()
            print(f"score: {done:,} of {total:,} tokens, {rate()}", file=sys.stderr, flush=True)

    with bars:
        yield advance
