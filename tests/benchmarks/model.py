"""How fast and how lean the model is, against transformers and against plain matmuls.

    python tests/benchmarks/model.py [--only NAME ...] [--pairs N] [--patience S]

Every figure is a ratio of neighbouring runs on this machine (A B A B ..., in processes that take
turns), its median over the pairs; no figure is a time. The reference is transformers'
Qwen3_5MoeForCausalLM with random weights in float32, with whichever of its expert and attention
kernels is fastest for the task. A figure taken while others used the machine is not judged. The
last line is one JSON document.

Why these: a model this size on CPU is bound by matrix products (the shares of the plain rate say
how nearly), decoding by reading weights, and what a mixture adds to a dense model is the sorting
and moving of rows, which the grouped figures isolate. Not covered: TPU kernels, bfloat16, meshes of
more than one device.

Peak memory of a training step: growth of the process's peak resident set (VmHWM, which is
ru_maxrss, reset before) over three steps, above the resident set after imports, weights, tokens
and, for us, compiling; gradients are outputs and count, an optimizer has no part in it.
"""

import argparse
import dataclasses
import json
import signal
import statistics
import sys
from collections.abc import Callable, Iterator

import psutil
from model_sizes import DECODE_STEPS, FORMULA, POSITIONS, ROWS, document, forward_flops
from workers import QUIET, Pace, Rounds, Worker, take_turns, wait_for_quiet, worker

OURS, REFERENCE = "model_ours.py", "model_reference.py"
PLAIN = {"rows": 16384, "inner": 512, "outer": 512}  # the experts' product, as one dense matrix
CUBE = {"rows": 2048, "inner": 2048, "outer": 2048}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A median ratio and what it should be; `target` None: for information."""

    name: str
    ratios: list[float]
    target: float | None = None
    at_least: bool = True
    others: float = 0.0
    note: str = ""

    @property
    def measured(self) -> float:
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool | None:
        """Compared as printed, to two decimals: below that is noise here.

        None without a target, and when others used the machine meanwhile: torch's threads wait for
        each other by spinning, so that a busy core makes the reference several times slower.
        """
        if self.target is None or self.others > QUIET:
            return None
        rounded = round(self.measured, 2)
        return rounded >= self.target if self.at_least else rounded <= self.target

    def row(self) -> str:
        sign = "≥" if self.at_least else "≤"
        target = "" if self.target is None else f"{sign} {self.target:g}"
        spread = f"{min(self.ratios):.2f}-{max(self.ratios):.2f}"
        met = {None: "busy" if self.others > QUIET else "", True: "yes", False: "NO"}[self.met]
        return (
            f"{self.name:<58} {target:>7} {self.measured:>9.2f} {spread:>13} {met:>4}"
            f" {self.others:>6.0%}  {self.note}"
        )

    def record(self) -> dict[str, object]:
        return {
            "figure": self.name, "target": self.target,
            "direction": "at least" if self.at_least else "at most",
            "measured": self.measured, "met": self.met, "pairs": self.ratios,
            "others": self.others, "note": self.note,
        }


HEADER = f"{'figure':<58} {'target':>7} {'measured':>9} {'range':>13} {'met':>4} {'others':>6}"


def at_least(name, ratios, target, rounds: Rounds, note="") -> Figure:
    return Figure(name, ratios, target, True, rounds.others, note)


def at_most(name, ratios, target, rounds: Rounds, note="") -> Figure:
    return Figure(name, ratios, target, False, rounds.others, note)


# ---- against the reference ----------------------------------------------------------------------


def fastest_kernels(
    reference: Worker, task: str, candidates, pace: Pace, **arguments
) -> dict[str, str]:
    """The reference's quickest pair of expert and attention kernels for this task."""
    timers = {}
    for experts, attention in candidates:
        timers[f"{experts}+{attention}"] = reference.prepare(
            f"{experts}+{attention}", task, experts=experts, attention=attention, **arguments
        )
    rounds = take_turns(timers, dataclasses.replace(pace, rounds=3))
    for name in timers:
        reference.ask("drop", name)
    best = min(timers, key=lambda name: min(rounds.seconds[name]))
    print(f"  reference {task}: {best} is fastest of", ", ".join(
        f"{name} {min(seconds):.3f} s" for name, seconds in rounds.seconds.items()
    ), flush=True)
    return dict(zip(("experts", "attention"), best.split("+"), strict=True))


# Left out where they are hopeless: batched_mm copies an expert's weights for every routed copy (17
# GB for the batch), and the eager loop's backward is 4 times grouped_mm's.
ATTENTION = [("grouped_mm", "sdpa"), ("grouped_mm", "eager")]
CANDIDATES = {
    "forward": [*ATTENTION, ("eager", "sdpa")],
    "train": ATTENTION,
    "decode": [*ATTENTION, ("eager", "sdpa"), ("batched_mm", "sdpa")],
}


def compare(task: str, passes: int, share: float, speed: float, pace: Pace) -> Iterator[Figure]:
    """One task of both, and the plain rate, in turns. `passes`: forward passes' worth of work."""
    with worker(OURS) as ours, worker(REFERENCE) as reference:
        kernels = fastest_kernels(reference, task, CANDIDATES[task], pace)
        rounds = take_turns(
            {
                "ours": ours.prepare("ours", task),
                "reference": reference.prepare("reference", task, **kernels),
                "plain": ours.prepare("plain", "plain", **PLAIN),
            },
            pace,
        )
    flops = passes * forward_flops(document(), ROWS * POSITIONS, POSITIONS)
    plain_flops = 2 * PLAIN["rows"] * PLAIN["inner"] * PLAIN["outer"]
    shares = {
        name: [x * flops / plain_flops for x in rounds.ratio("plain", name)]
        for name in ("ours", "reference")
    }
    what = {"forward": "forward", "train": "forward + backward"}[task]
    seconds = f"{rounds.median('ours'):.3f} s, reference {rounds.median('reference'):.3f} s"
    yield at_least(
        f"{what}: our speed / reference", rounds.ratio("reference", "ours"), speed, rounds, seconds
    )
    note = f"plain {plain_flops / rounds.median('plain') / 1e9:.0f} GFLOP/s"
    yield at_least(f"{what}: share of the plain rate", shares["ours"], share, rounds, note)
    yield at_least(
        f"{what}: the reference's share of that rate", shares["reference"], None, rounds
    )


def forward(pace: Pace) -> Iterator[Figure]:
    """Logits of 4 x 512 tokens."""
    yield from compare("forward", 1, 0.8, 1.0, pace)


def train(pace: Pace) -> Iterator[Figure]:
    """Mean log-prob of 4 x 512 tokens and its gradient by every parameter."""
    yield from compare("train", 3, 0.75, 1.2, pace)


def decode(pace: Pace) -> Iterator[Figure]:
    """Steps of greedy decoding after 256 cached tokens, at batch 16 and 1."""
    for rows, target in ((16, 3.0), (1, None)):
        with worker(OURS) as ours, worker(REFERENCE) as reference:
            candidates = CANDIDATES["decode"][: 4 if rows == 1 else 3]
            kernels = fastest_kernels(reference, "decode", candidates, pace, rows=rows)
            rounds = take_turns(
                {
                    "ours": ours.prepare("ours", "decode", rows=rows),
                    "reference": reference.prepare("reference", "decode", rows=rows, **kernels),
                    "read": ours.prepare("read", "read"),
                },
                pace,
            )
            step_bytes = ours.ask("call", "decode_bytes", arguments={"rows": rows})
            read_bytes = ours.ask("call", "read_bytes")
        # Seconds in which the step's weights are read at the measured rate, over a step's seconds.
        shares = {
            name: [x * step_bytes / read_bytes * DECODE_STEPS for x in rounds.ratio("read", name)]
            for name in ("ours", "reference")
        }
        per_step = {name: 1e3 * rounds.median(name) / DECODE_STEPS for name in rounds.seconds}
        yield at_least(
            f"decode step at batch {rows}: our speed / reference",
            rounds.ratio("reference", "ours"), target, rounds,
            f"{per_step['ours']:.1f} ms, reference {per_step['reference']:.1f} ms",
        )
        limit = statistics.median(shares["reference"])
        yield at_least(
            f"decode step at batch {rows}: share of the rate of reading weights", shares["ours"],
            0.6 if rows == 16 else None, rounds,
            f"{step_bytes / 1e6:.0f} MB at {read_bytes / rounds.median('read') / 1e9:.0f} GB/s; "
            f"at that rate alone: {1 / limit:.2f} x the reference",
        )


def memory(pace: Pace) -> Iterator[Figure]:
    """Peak memory of a training step; deterministic, so once."""
    with worker(REFERENCE) as reference:
        kernels = {"experts": "grouped_mm", "attention": "sdpa"}
        theirs = reference.ask("call", "train_memory", arguments=kernels)["growth"]
    with worker(OURS) as ours:
        mine = ours.ask("call", "train_memory")
    yield Figure(
        "training step: our peak memory / reference", [mine["growth"] / theirs], 0.8, False,
        note=f"{mine['growth'] / 1e9:.2f} GB (planned {mine['planned'] / 1e9:.2f}), "
        f"reference {theirs / 1e9:.2f} GB",
    )


def rates(pace: Pace) -> Iterator[Figure]:
    """The plain rates themselves, ours and torch's, in two shapes."""
    with worker(OURS) as ours, worker(REFERENCE) as reference:
        timers = {
            f"{who} {name}": process.prepare(name, "plain", **shape)
            for who, process in (("jax", ours), ("torch", reference))
            for name, shape in (("[16384,512]x[512,512]", PLAIN), ("2048 cubed", CUBE))
        }
        rounds = take_turns(timers, pace)
    for name, shape in (("[16384,512]x[512,512]", PLAIN), ("2048 cubed", CUBE)):
        flops = 2e-9 * shape["rows"] * shape["inner"] * shape["outer"]
        speeds = [flops / rounds.median(f"{who} {name}") for who in ("jax", "torch")]
        yield at_least(
            f"plain rate {name}: jax / torch", rounds.ratio(f"torch {name}", f"jax {name}"), None,
            rounds, "{:.0f} and {:.0f} GFLOP/s".format(*speeds),
        )


# ---- of ours alone ------------------------------------------------------------------------------


def grouped(pace: Pace) -> Iterator[Figure]:
    """The grouped product against one dense product over as many rows, and many experts."""
    for gradient in (False, True):
        for name, inner, outer in (("up", 512, 512), ("down", 256, 512)):
            with worker(OURS) as ours:
                rounds = take_turns(
                    {
                        str(experts): ours.prepare(
                            str(experts), "grouped", experts=experts, inner=inner, outer=outer,
                            gradient=gradient,
                        )
                        for experts in (0, 64, 256)
                    },
                    pace,
                )
            what = f"grouped matmul, {name}{', with gradients' if gradient else ''}"
            yield at_most(f"{what}: time / dense", rounds.ratio("64", "0"), 1.6, rounds)
            yield at_most(
                f"{what}: time at 256 experts / 64", rounds.ratio("256", "64"), 1.6, rounds
            )


def replay(pace: Pace) -> Iterator[Figure]:
    """Given routes, with and without a plan, against live routing; and returning the routes."""
    for task in ("forward", "train"):
        with worker(OURS) as ours:
            timers = {
                variant: ours.prepare(variant, task, variant=variant)
                for variant in ("live", "replay", "planned")
            }
            if task == "forward":
                timers["routes"] = ours.prepare("routes", task, with_routes=True)
            rounds = take_turns(timers, pace)
        yield at_most(f"{task}: replay / live", rounds.ratio("replay", "live"), 1.0, rounds)
        yield at_most(
            f"{task}: replay with a plan / live", rounds.ratio("planned", "live"), 1.0, rounds
        )
        if task == "forward":
            yield at_most(
                "forward: returning routes / not", rounds.ratio("routes", "live"), 1.01, rounds
            )


def compilation(pace: Pace) -> Iterator[Figure]:
    """Tracing, lowering and compiling 48 layers against 8, of small widths."""
    for gradient in (False, True):
        with worker(OURS) as ours:
            rounds = take_turns(
                {
                    str(layers): ours.prepare(
                        str(layers), "compile", layers=layers, gradient=gradient
                    )
                    for layers in (8, 48)
                },
                dataclasses.replace(pace, rounds=min(pace.rounds, 3)),
            )
        yield at_most(
            f"compile time, {'gradient' if gradient else 'forward'}: 48 layers / 8",
            rounds.ratio("48", "8"), 1.5, rounds,
            f"{rounds.median('48'):.1f} s, {rounds.median('8'):.1f} s",
        )


BENCHMARKS: dict[str, Callable[[Pace], Iterator[Figure]]] = {
    "forward": forward,
    "train": train,
    "decode": decode,
    "memory": memory,
    "grouped": grouped,
    "replay": replay,
    "compile": compilation,
    "rates": rates,
}


def command(
    name: str, benchmarks: dict[str, Callable[[Pace], Iterator[Figure]]], about: str
) -> None:
    """Runs the benchmarks that the command line asks for; the last line is one JSON document."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=benchmarks, default=list(benchmarks))
    parser.add_argument("--pairs", type=int, default=7, help="neighbouring runs per figure")
    parser.add_argument(
        "--patience", type=float, default=60.0,
        help="seconds that one comparison tries for rounds without others on the machine",
    )
    chosen = parser.parse_args()
    pace = Pace(rounds=chosen.pairs, patience_s=chosen.patience)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers are closed
    sys.stdout.reconfigure(line_buffering=True)
    before = psutil.cpu_percent(interval=1.0)
    print(f"{psutil.cpu_count()} cores, {before:.0f}% busy before the first run")
    figures = []
    for only in chosen.only:
        wait_for_quiet(pace.patience_s / 2)
        for figure in benchmarks[only](pace):
            print(figure.row())
            figures.append(figure)
    print(f"\n{HEADER}", *(figure.row() for figure in figures), sep="\n")
    print("range: of the pairs. others: share of the machine that other processes had meanwhile.")
    print(json.dumps({
        "benchmark": name, "busy_before": before / 100,
        "figures": [figure.record() for figure in figures],
    }))


if __name__ == "__main__":
    print(f"shares count: {FORMULA}")
    command("model", BENCHMARKS, __doc__)
