"""How fast the sampler is, against transformers' `generate` with the same weights and lengths.

    python tests/benchmarks/sampling.py [--only NAME ...] [--pairs N] [--patience S]

Ratios of neighbouring runs, as tests/benchmarks/model.py explains; what is timed here is the whole
path of a token: the engine's decode step with the draw, its log-probs and routes copied to the
host, or `generate`'s own loop between its first token and its last. The model is model_sizes': 221
million parameters in float32. The last line is one JSON document.

Decoding reads weights: `share` compares a step with the time in which the weights that it must read
are read, or copied, at the rates that this machine shows in the same run. Not covered: TPU,
bfloat16, several devices.
"""

import statistics
import tempfile
from collections.abc import Iterator

from model import ATTENTION, CANDIDATES, Figure, at_least, at_most, command, fastest_kernels
from model_sizes import CACHED, DECODE_STEPS
from workers import Pace, take_turns, worker

OURS, REFERENCE = "sampling_ours.py", "sampling_reference.py"
FOLDER = tempfile.TemporaryDirectory(prefix="t1jax-sampling-")  # the weights of both


def weights() -> str:
    """The folder that both sides read; written once."""
    if not weights.written:
        with worker(REFERENCE) as reference:
            reference.ask("call", "write", arguments={"folder": FOLDER.name})
        weights.written = True
    return FOLDER.name


weights.written = False


def decode(pace: Pace) -> Iterator[Figure]:
    """Tokens after 256 cached ones, at batch 16 and 1."""
    folder = weights()
    for rows in (16, 1):
        with worker(OURS) as ours, worker(REFERENCE) as reference:
            candidates = CANDIDATES["decode"][: 4 if rows == 1 else 3]
            kernels = fastest_kernels(
                reference, "decode", candidates, pace, rows=rows, folder=folder
            )
            rounds = take_turns(
                {
                    "ours": ours.prepare("ours", "decode", rows=rows, folder=folder),
                    "reference": reference.prepare(
                        "reference", "decode", rows=rows, folder=folder, **kernels
                    ),
                    "read": ours.prepare("read", "read", folder=folder),
                    "copy": ours.prepare("copy", "copy", folder=folder),
                },
                pace,
            )
            step_bytes = ours.ask(
                "call", "decode_bytes", arguments={"rows": rows, "folder": folder}
            )
            read_bytes = ours.ask("call", "read_bytes", arguments={"folder": folder})
        step_ms = {name: 1e3 * rounds.median(name) / DECODE_STEPS for name in rounds.seconds}
        yield at_least(
            f"decode at batch {rows}: our speed / generate", rounds.ratio("reference", "ours"),
            3.0, rounds, f"{step_ms['ours']:.1f} ms, generate {step_ms['reference']:.1f} ms",
        )
        for rate, moved in (("read", 1), ("copy", 2)):
            shares = {
                name: [
                    x * step_bytes / (read_bytes * moved) * DECODE_STEPS
                    for x in rounds.ratio(rate, name)
                ]
                for name in ("ours", "reference")
            }
            yield at_least(
                f"decode at batch {rows}: share of the rate of weights ({rate})", shares["ours"],
                0.6 if rows == 16 and rate == "copy" else None, rounds,
                f"{step_bytes / 1e6:.0f} MB at "
                f"{moved * read_bytes / rounds.median(rate) / 1e9:.0f} GB/s; at that rate alone: "
                f"{1 / statistics.median(shares['reference']):.2f} x generate",
            )


def first_token(pace: Pace) -> Iterator[Figure]:
    """A prompt of 1,000 tokens to its first sampled one."""
    folder = weights()
    with worker(OURS) as ours, worker(REFERENCE) as reference:
        kernels = fastest_kernels(reference, "first_token", ATTENTION, pace, folder=folder)
        rounds = take_turns(
            {
                "ours": ours.prepare("ours", "first_token", folder=folder),
                "reference": reference.prepare(
                    "reference", "first_token", folder=folder, **kernels
                ),
            },
            pace,
        )
    yield at_least(
        "first token of 1,000: our speed / generate", rounds.ratio("reference", "ours"), 1.0,
        rounds, f"{rounds.median('ours'):.2f} s, generate {rounds.median('reference'):.2f} s",
    )


def routes(pace: Pace) -> Iterator[Figure]:
    """Decoding with routes and without."""
    folder = weights()
    with worker(OURS) as ours:
        timers = {
            str(capture): ours.prepare(
                str(capture), "decode", rows=16, folder=folder, capture_routes=capture
            )
            for capture in (True, False)
        }
        rounds = take_turns(timers, pace)
        sizes = ours.ask("call", "route_bytes", arguments={"folder": folder})
    yield at_most(
        "decode with routes / without", rounds.ratio("True", "False"), 1.01, rounds,
        f"{1e3 * rounds.median('True') / DECODE_STEPS:.1f} ms",
    )
    per = sizes["bytes"] / sizes["layers"]
    yield Figure(
        f"route bytes of a token and layer (K = {sizes['chosen']})", [per], sizes["chosen"], False
    )


def scheduler(pace: Pace) -> Iterator[Figure]:
    """What the scheduler adds to a step of 16 requests."""
    folder = weights()
    with worker(OURS) as ours:
        seen = [
            ours.ask("call", "scheduled", arguments={"folder": folder, "rows": 16, "tokens": 64})
            for _ in range(pace.rounds)
        ]
    yield Figure(
        "scheduler: host time / engine time of a step at batch 16",
        [x["host_ms"] / x["engine_ms"] for x in seen], 0.05, False,
        note=f"{statistics.median(x['host_ms'] for x in seen):.2f} ms",
    )


def turns(pace: Pace) -> Iterator[Figure]:
    """Turn 50 of a conversation and turn 5, 32 new tokens each way."""
    folder = weights()
    with worker(OURS) as ours:
        runs = [
            ours.ask("call", "conversation", arguments={"folder": folder, "turns": 52})
            for _ in range(min(pace.rounds, 3))
        ]
    around = lambda run, turn: statistics.median(  # noqa: E731
        one["seconds"] for one in run[turn - 2 : turn + 1]
    )
    late, early = runs[0][49], runs[0][4]
    yield Figure(
        "turn 50 / turn 5, equal new tokens", [around(r, 50) / around(r, 5) for r in runs],
        note=f"{around(runs[0], 50):.2f} s at {late['stream']} tokens of which {late['read']} "
        f"read, {around(runs[0], 5):.2f} s at {early['stream']} of which {early['read']} read; "
        f"reading all of it at {CACHED} tokens a chunk would be {late['stream']} tokens",
    )


def compilations(pace: Pace) -> Iterator[Figure]:
    """A mixed load after its warm-up."""
    folder = weights()
    with worker(OURS) as ours:
        seen = ours.ask("call", "mixed_load", arguments={"folder": folder, "seconds": 120.0})
    yield Figure(
        "programs compiled after warm-up in a mixed load", [seen["after"]], 0, False,
        note=f"{seen['warm_up']} before; {seen['requests']} conversations, {seen['steps']} steps",
    )


BENCHMARKS = {
    "decode": decode, "first_token": first_token, "routes": routes, "scheduler": scheduler,
    "turns": turns, "compilations": compilations,
}  # fmt: skip

if __name__ == "__main__":
    command("sampling", BENCHMARKS, __doc__)
