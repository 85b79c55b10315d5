"""`t1jax mismatch`: what the gap between trainer and sampler is made of, on recorded trajectories.

The same trajectories at the same weights, four times: {as sampled, text encoded again} x {routes
replayed, live router}. See docs/training.md for how each enters. Below a run's folder the run says
which weights played and in which dtype; elsewhere they are named.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t1jax.config import Config, load_config, parse_config
from t1jax.data.folder import list_entries
from t1jax.data.packing import Piece, pieces_of
from t1jax.errors import UserError
from t1jax.pipeline import gap
from t1jax.pipeline.episodes import check_sampled
from t1jax.pipeline.learning import Setup, load_policy, open_setup, policy_path
from t1jax.pipeline.policy import identity
from t1jax.trajectory.chat import Chat

FILE = "mismatch.json"
FIRST_ROLLOUT = Path("trajectories", "ppo", "step-000000")  # by the weights that PPO began with
SETTINGS = "settings.json"  # of a folder that `t1jax rollout` or `eval` wrote
CELLS = ("tito_replay", "tito_live", "retokenised_replay", "retokenised_live")
LABELS = {
    "tito_replay": "as sampled, replay", "tito_live": "as sampled, live router",
    "retokenised_replay": "encoded again, replay", "retokenised_live": "encoded again, live router",
    "movement": "movement to --after",
}  # fmt: skip
Told = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What is measured, everything decided."""

    trajectories: Path
    config: Config  # model: the checkpoint that sampled, and how it is executed
    out: Path | None


def mismatch(
    trajectories: str,
    *,
    checkpoint: str = "",
    after: str = "",
    out: str = "",
    dtype: str = "",
    mesh: str = "",
    limit: int = 0,
    seed: int = 0,
    batch_tokens: int = 16384,
    on_missing: str = "error",
) -> Told:
    """Measures, prints a table, and writes a JSON document where that was asked for.

    Args:
      trajectories: a folder of them, or a run's folder: its first PPO rollout is taken.
      checkpoint: the weights that sampled; empty: as the run says.
      after: a checkpoint; how far it moved from there is told beside. Empty: none.
      out: a file; empty: RUN/mismatch.json, or none outside of a run.
      dtype: of activations; empty: the run's, else float32.
      mesh: as in `--mesh`; empty: the run's, else one device.
      limit: at most so many trajectories, a sample drawn with the seed; 0: all.
      seed: of that draw and of the intervals.
      batch_tokens: most tokens in a pass, padding included; a chunk is never split.
      on_missing: `error`, or `live` where a sampled stream lacks a route.

    Raises:
      UserError: nothing there to compare, or the weights cannot be those that sampled.
    """
    asked = _decide(Path(trajectories), checkpoint, out, dtype, mesh)
    pieces = _read(asked.trajectories, limit, seed, on_missing)
    setup = open_setup(asked.config)
    measured = _measure(setup, pieces, after, seed, batch_tokens)
    measured["setting"] = {
        "trajectories": str(asked.trajectories), "checkpoint": asked.config.model.checkpoint,
        "after": after, "dtype": asked.config.model.dtype, "mesh": asked.config.model.mesh,
        "limit": limit, "seed": seed, "on_missing": on_missing,
    }  # fmt: skip
    print("\n".join(table(measured)))
    if asked.out is not None:
        _write(asked.out, measured)
        print(f"wrote {asked.out}")
    return measured


# ---- what is compared ----------------------------------------------------------------------------


def _decide(folder: Path, checkpoint: str, out: str, dtype: str, mesh: str) -> Asked:
    """Fills in what the run says."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no directory; expected a folder of trajectories, or a run's")
    run = next((f for f in (folder, *folder.absolute().parents) if _is_run(f)), None)
    if run == folder:
        folder = run / FIRST_ROLLOUT
        if not folder.is_dir():
            raise UserError(
                f"{run} holds no {FIRST_ROLLOUT}: PPO has not begun. Name a folder of trajectories"
            )
    if run is None:
        tree: dict[str, Any] = {"run": ".", "model": {"checkpoint": checkpoint, "dtype": "float32"}}
        config = parse_config(tree, "the defaults")
    else:
        config = load_config(run / "config.yaml").model_copy(update={"run": str(run)})
    played = checkpoint or _who_played(folder, run, config)
    changes = {"checkpoint": played, **{n: x for n, x in (("dtype", dtype), ("mesh", mesh)) if x}}
    model = config.model.model_copy(update=changes)
    where = Path(out) if out else run / FILE if run is not None else None
    return Asked(trajectories=folder, config=config.model_copy(update={"model": model}), out=where)


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "trajectories").is_dir()


def _who_played(folder: Path, run: Path | None, config: Config) -> str:
    """The weights that sampled, where the run knows them."""
    if run is not None and folder.absolute() == (run / FIRST_ROLLOUT).absolute():
        return policy_path(config, "ppo")
    file = folder / SETTINGS
    settings = json.loads(file.read_text()) if file.is_file() else {}
    if not settings.get("checkpoint"):
        raise UserError(f"nothing says which weights sampled {folder}; name them with --checkpoint")
    known = {name: settings[name] for name in ("checkpoint", "manifest_sha256")}
    if identity(known["checkpoint"]) != known:
        raise UserError(
            f"{folder} was sampled by weights that lay in {known['checkpoint']}; others lie there "
            "now. Name the ones that sampled with --checkpoint"
        )
    return str(known["checkpoint"])


def _read(folder: Path, limit: int, seed: int, on_missing: str) -> list[Piece]:
    """Chunks of graded trajectories that one set of weights sampled."""
    entries, _ = list_entries(str(folder), keep="all", per_task=0, seed=seed)
    if 0 < limit < len(entries):
        chosen = np.random.default_rng(seed).permutation(len(entries))[:limit]
        entries = [entries[n] for n in sorted(chosen.tolist())]
    longest = max(length for entry in entries for length in entry.tokens)
    loaded = ((entry.path, entry.load()) for entry in entries)
    pieces, _ = pieces_of(loaded, tokens=longest, too_long="error")
    if not pieces:
        raise UserError(f"none of the {len(entries)} trajectories in {folder} has a sampled token")
    version = int(pieces[0].chunk.versions[pieces[0].chunk.mask][0])
    for piece in pieces:
        check_sampled(piece.name, piece.chunk, version)
        if on_missing == "error" and piece.chunk.missing_rows:
            raise UserError(
                f"trajectory {piece.name} lacks the routes of {piece.chunk.missing_rows} of "
                f"{len(piece.chunk) - 1} tokens; --on-missing live lets the router choose there"
            )
    return pieces


# ---- the measurement -----------------------------------------------------------------------------


def _measure(
    setup: Setup, pieces: Sequence[Piece], after: str, seed: int, batch_tokens: int
) -> Told:
    params = load_policy(setup, setup.config.model.checkpoint)
    chat = Chat.load(setup.config.model.checkpoint)
    score = gap.Scorer(setup, batch_tokens)
    streams = gap.recorded(pieces)
    weights = gap.draws(max(stream.trajectory for stream in streams) + 1, seed)
    by_tokens = {"tito": streams, "retokenised": gap.encoded_again(streams, chat)}
    told: Told = {}
    means, scored = {}, {}
    for cell in CELLS:
        tokens, routing = cell.split("_")
        began = time.monotonic()
        scores = score(params, by_tokens[tokens], replay=routing == "replay")
        found = gap.against_sampler(by_tokens[tokens], scores.logprobs)
        means[cell], scored[cell] = found.means(weights), scores
        told[cell] = _told(found, means[cell]) | _counts(by_tokens[tokens], scores)
        print(f"{cell}: scored in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    told["parts"] = {
        "engine": gap.estimate(means["tito_replay"]),
        "routing": gap.estimate(means["tito_live"] - means["tito_replay"]),
        "tokens": gap.estimate(means["retokenised_replay"] - means["tito_replay"]),
    }
    if after:
        moved = score(load_policy(setup, after), streams, replay=True)
        found = gap.between(streams, moved.logprobs, scored["tito_replay"].logprobs)
        told["movement"] = _told(found, found.means(weights))
    return told


def _told(found: gap.Gap, means: np.ndarray) -> Told:
    numbers = gap.metrics(found)
    del numbers["train_rollout_logprob_abs_diff"]  # `abs_diff` is that, per sampled token
    trajectories = len(np.unique(found.trajectory))
    return gap.estimate(means) | numbers | {
        "tokens": int(found.tokens.sum()), "trajectories": trajectories
    }  # fmt: skip


def _counts(streams: Sequence[gap.Stream], scores: gap.Scores) -> Told:
    return {
        "changed": sum(stream.changed for stream in streams),
        "lost": sum(stream.lost for stream in streams),
        "rows_replayed": scores.rows,
        "replay_replace_rate": scores.replaced / scores.rows if scores.rows else None,
    }


def table(measured: Mapping[str, Any]) -> list[str]:
    """The measurement as a person reads it."""
    head = ("", "mean |d|", "95% interval", "k3", "max |d|", "compared", "ids changed")
    rows = [head]
    for name in (*CELLS, "movement"):
        if name in measured:
            cell = measured[name]
            low, high = cell["ci95"]
            rows.append((
                LABELS[name], f"{cell['abs_diff']:.3g}", f"{low:.3g} to {high:.3g}",
                _number(cell["k3"]), _number(cell["max"]), f"{cell['tokens']:,}",
                f"{cell['changed']:,}" if "changed" in cell else "",
            ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    rate = measured["tito_replay"]["replay_replace_rate"]
    if rate is not None:
        lines.append(f"replay overrules the live router in {rate:.3%} of the rows as sampled")
    return lines


def _number(x: float | None) -> str:
    return "beyond float32" if x is None else f"{x:.3g}"


def _write(file: Path, measured: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    work = file.with_name(f"{file.name}.new")
    work.write_text(json.dumps(measured, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(work, file)
