"""Training: the steps, what surrounds them, and what they hold in memory.

    python tests/benchmarks/training.py [--only NAME ...] [--pairs N] [--patience S]

Ratios of neighbouring runs in the same process or of two that take turns; see model.py. The model
of the steps is model.py's (221M parameters, 4 x 512 tokens, float32). The last line is one JSON
document.

Why these: a training step is the model's gradient plus an optimizer that reads and writes four
times the weights; replay saves the router's top-k and the planning of the dispatch; a loop's host
side has to hide behind the device. The loop that is measured is the real one of `t1jax sft`, over
trajectories on disk, with a model whose step is short: a longer step only makes the share smaller.
Memory is what the compiler plans, which does not depend on the machine.
"""

from collections.abc import Iterator

from model import Figure, at_least, at_most, command
from workers import Pace, take_turns, worker

OURS, REFERENCE = "training_ours.py", "training_reference.py"
MIXES = (  # median length, spread of its logarithm, trajectories, rows of a micro-batch
    (12000, 0.9, 512, 8),
    (12000, 0.9, 128, 4),
    (30000, 0.6, 512, 8),
)


def step(pace: Pace) -> Iterator[Figure]:
    """A whole step of supervised fine-tuning against the reference's."""
    with worker(OURS) as ours, worker(REFERENCE) as reference:
        kernels = {"experts": "grouped_mm", "attention": "sdpa"}
        rounds = take_turns(
            {
                "ours": ours.prepare("ours", "sft"),
                "reference": reference.prepare("reference", "step", **kernels),
            },
            pace,
        )
    seconds = f"{rounds.median('ours'):.2f} s, reference {rounds.median('reference'):.2f} s"
    yield at_least(
        "step with optimizer: our speed / reference", rounds.ratio("reference", "ours"), 1.2,
        rounds, seconds,
    )  # fmt: skip


def replay(pace: Pace) -> Iterator[Figure]:
    """PPO's update under recorded routes against the same under the live router."""
    with worker(OURS) as ours:
        rounds = take_turns({name: ours.prepare(name, name) for name in ("live", "replay")}, pace)
    note = f"{rounds.median('replay'):.2f} s, live {rounds.median('live'):.2f} s"
    yield at_most(
        "actor step: replay / live routing", rounds.ratio("replay", "live"), 1.0, rounds, note
    )


def packing(pace: Pace) -> Iterator[Figure]:
    """Long-tailed lengths in rows of 86,016 columns; nothing is timed."""
    with worker(OURS) as ours:
        for median, spread, trajectories, rows in MIXES:
            share = ours.ask("call", "packing", arguments={
                "median": median, "spread": spread, "trajectories": trajectories, "rows": rows
            })  # fmt: skip
            what = f"packing: {trajectories} lengths, median {median:,}, spread {spread}"
            yield Figure(what, [share], 0.95, note=f"micro-batches of {rows} rows")


def loop(pace: Pace) -> Iterator[Figure]:
    """Host time between two steps, as a share of both."""
    with worker(OURS) as ours:
        told = ours.ask("call", "loop_gaps")
    share = told["gap"] / (told["gap"] + told["step"])
    note = f"{1e3 * told['gap']:.1f} ms between steps of {told['step']:.2f} s"
    yield Figure("sft loop: host time between steps / all", [share], 0.05, False, note=note)


def saving(pace: Pace) -> Iterator[Figure]:
    """How long a save holds up training, of the time in which all is on disk."""
    with worker(OURS) as ours:
        told = ours.ask("call", "saving")
    shares = [a / b for a, b in zip(told["blocked"], told["whole"], strict=True)]
    note = f"{told['bytes'] / 1e9:.2f} GB, {min(told['whole']):.1f} s to write"
    yield Figure("saving: blocked / written", shares, 0.1, False, note=note)


def memory(pace: Pace) -> Iterator[Figure]:
    """What temporary memory grows by with the vocabulary, of what whole logits would need."""
    positions, small, large = 4096, 8192, 65536
    for gradient in (False, True):
        with worker(OURS) as ours:
            planned = [
                ours.ask("call", "logprob_bytes", arguments={
                    "vocab": vocab, "positions": positions, "gradient": gradient,
                })
                for vocab in (small, large)
            ]  # fmt: skip
        logits = 4 * positions * (large - small)
        what = "gradient" if gradient else "pass"
        yield Figure(
            f"log-prob {what}: memory by vocabulary / logits", [(planned[1] - planned[0]) / logits],
            0.25, False,
            note=f"{planned[0] / 1e6:.0f} MB at {small:,} words, {planned[1] / 1e6:.0f} MB at "
            f"{large:,}; logits of {positions:,} tokens {4e-6 * positions * large:.0f} MB",
        )  # fmt: skip


BENCHMARKS = {
    "step": step, "replay": replay, "packing": packing, "loop": loop, "saving": saving,
    "memory": memory,
}  # fmt: skip

if __name__ == "__main__":
    command("training", BENCHMARKS, __doc__)
