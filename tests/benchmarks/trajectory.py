"""A long trajectory through the record and the disk, against plain copying in the same run.

    python tests/benchmarks/trajectory.py [--tokens 131072] [--layers 48] [--chosen 8]

Ours, in a process of its own: record (turns of 2,048 tokens, as an engine hands them over), check,
save, load, check. The reference, in another: the same arrays, copied once with numpy, written and
read with safetensors, nothing checked. Memory is the growth of the peak resident set over the size
of the routes; the arrays that the engine hands over do not count (one turn's are made at a time).
`written` has every change also appended to the log on disk, as `io.Writer` does.

The physics: 50 MB are moved a handful of times (append, growth, write, read, checksum) and compared
pairwise within each row for the check; a processor does each at 1 to 10 GB/s.
The last line is one JSON document.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import load_file, save_file

from t1jax.trajectory import io
from t1jax.trajectory.record import Ending, Finish, RouteShape
from t1jax.trajectory.recorder import Recorder

EXPERTS = 256
TURN_TOKENS = 2048
SECONDS_TARGET, MEMORY_TARGET = 2.0, 3.0
ENDING = Ending(task="benchmark/long", outcome="solved", reward=1.0)


def rows(random: np.random.Generator, tokens: int, shape: RouteShape) -> np.ndarray:
    """Distinct ids in every row: a random start and an odd step, modulo 256 as uint8 wraps."""
    start, step = random.integers(0, 128, (2, tokens, shape.layers, 1), np.uint8)
    return start + (2 * step + 1) * np.arange(shape.chosen, dtype=np.uint8)


def fill(recorder: Recorder, tokens: int, shape: RouteShape, seconds: list[float]) -> None:
    """Appends turns, half of each sampled; times only the recorder."""
    random = np.random.default_rng(0)
    while len(recorder) < tokens:
        first = max(len(recorder) - 1, 0)
        count = min(TURN_TOKENS, tokens - len(recorder))
        new = rows(random, len(recorder) + count - 1 - first, shape)
        given, sampled = np.array_split(random.integers(0, 248320, count), 2)
        logprobs = -random.random(len(sampled), np.float32)
        begin = time.perf_counter()
        recorder.append_context(given)
        recorder.append_sampled(sampled, logprobs, version=1, finish=Finish.stop)
        recorder.record_routes(first, new)
        seconds[0] += time.perf_counter() - begin


def ours(folder: Path, tokens: int, shape: RouteShape, written: bool) -> dict[str, float]:
    """Seconds of each stage."""
    seconds = [0.0]
    begin_record = time.perf_counter()
    writer = io.Writer(folder / "t", shape) if written else None
    recorder = writer.recorder if writer else Recorder(shape)
    seconds[0] += time.perf_counter() - begin_record
    fill(recorder, tokens, shape, seconds)
    begin = time.perf_counter()
    if writer:
        writer.finish(ENDING)
    else:
        io.save_trajectory(recorder.finish(ENDING), folder / "t")
    del recorder, writer
    saved = time.perf_counter()
    (chunk,) = io.load_trajectory(folder / "t").chunks
    loaded = time.perf_counter()
    assert len(chunk) == tokens
    return {"record": seconds[0], "check_save": saved - begin, "load_check": loaded - saved}


def reference(folder: Path, tokens: int, shape: RouteShape) -> dict[str, float]:
    """The same bytes with a copy, a save and a load."""
    routes = rows(np.random.default_rng(0), tokens - 1, shape)
    columns = {"ids": np.zeros(tokens, np.int32), "mask": np.zeros(tokens, bool),
               "logprobs": np.zeros(tokens, np.float32), "versions": np.zeros(tokens, np.int32),
               "recorded": np.ones(tokens - 1, bool)}  # fmt: skip
    begin = time.perf_counter()
    columns["routes"] = routes.copy()
    copied = time.perf_counter()
    save_file(columns, folder / "reference")
    saved = time.perf_counter()
    load_file(folder / "reference")
    return {"record": copied - begin, "check_save": saved - copied,
            "load_check": time.perf_counter() - saved}  # fmt: skip


def child(which: str, tokens: int, shape: RouteShape) -> None:
    """Prints seconds and the growth of the peak resident set."""
    with tempfile.TemporaryDirectory() as folder:
        process = psutil.Process()
        before = process.memory_info().rss
        if which == "reference":
            seconds = reference(Path(folder), tokens, shape)
        else:
            seconds = ours(Path(folder), tokens, shape, which == "written")
        peak = next(
            int(line.split()[1]) * 1024
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmHWM")
        )
        print(json.dumps({"seconds": seconds, "growth_bytes": peak - before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--chosen", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", default="")
    args = parser.parse_args()
    shape = RouteShape(layers=args.layers, chosen=args.chosen, experts=EXPERTS)
    if args.child:
        return child(args.child, args.tokens, shape)
    kinds = ("reference", "ours", "written")
    runs: dict[str, list[dict]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds):  # taking turns, so that a busy machine slows all alike
        for kind in kinds:
            command = [sys.executable, __file__, *sys.argv[1:], "--child", kind]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            runs[kind].append(json.loads(out.splitlines()[-1]))
    routes_bytes = (args.tokens - 1) * args.layers * args.chosen
    total: Callable[[dict], float] = lambda run: sum(run["seconds"].values())  # noqa: E731
    best = {kind: min(runs[kind], key=total) for kind in kinds}
    for kind in kinds:
        stages = ", ".join(f"{name} {value:.3f} s" for name, value in best[kind]["seconds"].items())
        growth = best[kind]["growth_bytes"] / routes_bytes
        memory_note = "" if kind == "reference" else f", memory {growth:.2f} x the routes"
        print(f"{kind}: {total(best[kind]):.3f} s ({stages}){memory_note}")
    memory = max(run["growth_bytes"] for run in runs["ours"]) / routes_bytes
    median = statistics.median(map(total, runs["ours"]))
    print(json.dumps({
        "benchmark": "trajectory",
        "tokens": args.tokens, "layers": args.layers, "chosen": args.chosen,
        "routes_mb": round(routes_bytes / 1e6, 1),
        "seconds": round(median, 3), "seconds_target": SECONDS_TARGET,
        "memory_over_routes": round(memory, 2), "memory_target": MEMORY_TARGET,
        "seconds_over_copying": round(total(best["ours"]) / total(best["reference"]), 2),
        "written_over_copying": round(total(best["written"]) / total(best["reference"]), 2),
        "passed": median <= SECONDS_TARGET and memory <= MEMORY_TARGET,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
