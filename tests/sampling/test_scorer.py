"""The sampler's log-probs and routes are those that a pass over the whole stream gives.

200 conversations of three turns, with given text between, at temperatures 0, .6 and 1 and top-p .9,
against the model without cache, slots or chunks, under the recorded routes. Then the same
conversations through everything a scheduler may do to them.
"""

import asyncio
import functools

import numpy as np
import pytest

from t1jax.trajectory.record import Ending, RouteShape
from t1jax.trajectory.recorder import Recorder

from . import small as S

TEMPERATURES = (0.0, 0.6, 1.0)
TURNS = (9, 5, 7)  # sampled in each turn
FEW = 8  # conversations that go through the variants


def asked(i: int) -> dict:
    return {
        "temperature": TEMPERATURES[i % 3], "top_p": 0.9 if i % 2 else 1.0, "seed": 17 * i,
    }


async def converse(scheduler, i: int):
    """Three turns; what a turn gives is recorded as an agent's loop does."""
    moe = S.model().config.moe
    shape = RouteShape(layers=S.model().config.layers, chosen=moe.chosen, experts=moe.experts)
    recorder = Recorder(shape)
    for turn, tokens in enumerate(TURNS):
        recorder.append_context(S.prompt(3 + (5 * i + 7 * turn) % 23, seed=1000 * i + turn))
        request = S.request(recorder.stream, tokens, session=f"s{i}", **asked(i))
        done = await scheduler.complete(request)
        recorder.append_sampled(
            done.ids, done.logprobs, version=done.version, finish=done.finish
        )
        recorder.record_routes(done.first, done.routes)
    trajectory = recorder.finish(Ending(task="t", outcome="graded", reward=0.0))
    return trajectory.chunks[0]


def conversations(count: int, options=S.OPTIONS, mesh: str = ""):
    """Records of conversations, all under way at once, and the counters."""

    async def work(scheduler):
        done = await asyncio.gather(*(converse(scheduler, i) for i in range(count)))
        return done, scheduler.counters

    return S.run(work, options, mesh)


@functools.cache
def many():
    return conversations(200)


def test_200_conversations_are_scored_as_they_were_sampled():
    records, counters = many()
    errors, rows, different = [], 0, 0
    replayed = S.scored([r.ids for r in records], [r.routes for r in records])
    for i, (record, (logits, live)) in enumerate(zip(records, replayed, strict=True)):
        assert record.recorded.all() and len(record.ids) > 21
        rows += record.routes[..., 0].size
        different += (record.routes != live[:-1]).any(axis=-1).sum()
        of_next = S.logprobs(logits, TEMPERATURES[i % 3])
        want = of_next[np.arange(len(record.ids) - 1), record.ids[1:]]
        errors.append(np.abs(record.logprobs[1:] - want)[record.mask[1:]])
        if TEMPERATURES[i % 3] == 0:
            best = of_next[:-1].argmax(axis=-1)[record.mask[1:]]
            np.testing.assert_array_equal(record.ids[1:][record.mask[1:]], best)
    errors = np.concatenate(errors)
    assert len(errors) == 200 * sum(TURNS)
    # A tie within rounding may break either way; one shifted row would be thousands.
    assert different <= 4 and rows > 30_000
    assert errors.max() < 1e-4 and errors.mean() < 1e-6
    assert counters.cached_tokens > counters.prefill_tokens  # turns go on where they ended


VARIANTS = {
    "evicted between turns": (S.OPTIONS.model_copy(update={"cache_mb": 0}), ""),
    "one slot": (S.OPTIONS.model_copy(update={"slots": 1}), ""),
    "sixteen slots": (S.OPTIONS.model_copy(update={"slots": 16}), ""),
    "several steps at a time": (S.OPTIONS.model_copy(update={"steps_per_round": 4}), ""),
    "eight devices": (S.OPTIONS, "data=2,expert=2,tensor=2"),
}


LONG = ("eight devices",)


@pytest.mark.parametrize(
    "name",
    [
        *sorted(VARIANTS.keys() - LONG),
        *(pytest.param(name, marks=pytest.mark.slow) for name in LONG),
    ],
)
def test_the_same_conversations_however_they_are_run(name):
    options, mesh = VARIANTS[name]
    records, counters = conversations(FEW, options, mesh)
    for record, plain in zip(records, many()[0], strict=False):
        np.testing.assert_array_equal(record.ids, plain.ids)
        np.testing.assert_allclose(record.logprobs, plain.logprobs, atol=1e-4)
        assert (record.routes != plain.routes).any(axis=-1).sum() <= 1  # see above
    if name == "evicted between turns":
        assert counters.cached_tokens == 0 and counters.cached_bytes == 0
    if name == "one slot":  # an older conversation's next turn takes the place of a younger one
        assert counters.preemptions > 0
