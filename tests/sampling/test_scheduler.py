"""Requests from asyncio: what comes back, what is refused, and that nothing leaks."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest

from t1jax.errors import UserError
from t1jax.sampling.rounds import Piece
from t1jax.sampling.scheduler import ClosedError, QueueFullError
from t1jax.trajectory.completion import Completion, ContextFullError, RequestError
from t1jax.trajectory.record import Finish

from . import small as S


async def settled(scheduler):
    """The counters once nothing runs or waits."""
    for _ in range(1000):
        await scheduler.complete(S.request([1], 1))
        counters = scheduler.counters
        if counters.free_slots == S.OPTIONS.slots and not counters.waiting:
            return counters
    raise AssertionError(f"slots did not come back: {scheduler.counters}")


def same(one: Completion, other: Completion):
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    np.testing.assert_array_equal(one.routes, other.routes)


def test_a_stop_token_ends_the_answer_and_is_its_last():
    async def work(scheduler):
        free = await scheduler.complete(S.request(S.prompt(9), 12, seed=3))
        stop = int(free.ids[4])
        return free, await scheduler.complete(S.request(S.prompt(9), 12, seed=3, stops=[stop, 1]))

    free, stopped = S.run(work)
    end = min(free.ids.tolist().index(i) for i in (int(free.ids[4]), 1) if i in free.ids) + 1
    assert stopped.ids.tolist() == free.ids[:end].tolist()
    assert stopped.finish is Finish.stop and free.finish is Finish.length
    assert stopped.routes.shape[0] == 9 + end - 1 and stopped.first == 0
    assert stopped.routes.dtype == np.uint8
    assert set(stopped.seconds) == {"queue", "prefill", "decode"}
    assert all(s >= 0 for s in stopped.seconds.values())


def test_an_answer_does_not_depend_on_who_shares_the_batch():
    one = S.request(S.prompt(21), 8, seed=5, temperature=0.6, top_p=0.9)

    async def crowded(scheduler):
        others = [S.request(S.prompt(5 + i, i), 6 + i, seed=i) for i in range(7)]
        tasks = [asyncio.create_task(scheduler.complete(r)) for r in others]
        answer = await scheduler.complete(one)
        await asyncio.gather(*tasks)
        return answer

    same(S.run(lambda scheduler: scheduler.complete(one)), S.run(crowded))


def test_the_context_ends_an_answer():
    async def work(scheduler):
        return await scheduler.complete(S.request(S.prompt(S.OPTIONS.context - 3), 50))

    done = S.run(work)
    assert len(done.ids) == 3 and done.finish is Finish.length


def test_a_stream_gives_the_tokens_one_after_another_and_then_the_whole():
    async def work(scheduler):
        return [x async for x in scheduler.stream(S.request(S.prompt(9), 7, seed=2))]

    *pieces, whole = S.run(work)
    assert isinstance(whole, Completion) and all(isinstance(p, Piece) for p in pieces)
    assert np.concatenate([p.ids for p in pieces]).tolist() == whole.ids[:-1].tolist()


def test_slots_come_back_from_cancelled_requests_wherever_they_are():
    async def work(scheduler):
        ask = lambda i: scheduler.complete(S.request(S.prompt(90, i), 38))  # noqa: E731
        tasks = [asyncio.create_task(ask(i)) for i in range(12)]
        for task in tasks:
            await asyncio.sleep(0.002)
            task.cancel()
        gone = scheduler.stream(S.request(S.prompt(5), 100))
        await anext(gone)
        await gone.aclose()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(x, asyncio.CancelledError) for x in done)
        counters = await settled(scheduler)
        assert counters.cached_bytes == 0 and not scheduler._clients
        return await asyncio.gather(*map(ask, range(4)))

    assert [len(x.ids) for x in S.run(work)] == [38] * 4


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"prompt": S.prompt(128)}, ContextFullError,
         "a prompt of 128 tokens leaves no room in sampler.context=128"),
        ({"prompt": np.zeros(0, np.int32)}, RequestError, r"shape \[0\]"),
        ({"prompt": np.array([1.5])}, RequestError, "float64; expected integers"),
        ({"prompt": np.array([3, -1])}, RequestError, "token 1 has id -1"),
        ({"max_tokens": 0}, RequestError, "max_tokens=0; expected 1 or more"),
        ({"stop_ids": frozenset([64])}, RequestError, r"stop_ids=\[64\]; expected at most 8"),
        ({"stop_ids": frozenset(range(9))}, RequestError, "at most 8 ids from 0 to 63"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_answered_is_refused_at_once(wrong, kind, message):
    request = dataclasses.replace(S.request(S.prompt(5)), **wrong)
    with pytest.raises(kind, match=message):
        S.run(lambda scheduler: scheduler.complete(request))


def test_a_negative_temperature_is_refused():
    with pytest.raises(UserError, match=r"temperature is -0\.1; expected 0 or more"):
        S.request(S.prompt(5), temperature=-0.1)


def test_a_full_queue_says_so_and_goes_on():
    options = S.OPTIONS.model_copy(update={"waiting": 2})

    async def work(scheduler):
        tasks = [asyncio.create_task(scheduler.complete(S.request([i], 5))) for i in range(7)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        return done, await scheduler.complete(S.request([1], 5))

    done, after = S.run(work, options)
    assert [isinstance(x, Completion) for x in done] == [True] * 6 + [False]
    assert isinstance(done[6], QueueFullError) and "sampler.waiting=2" in str(done[6])
    assert len(after.ids) == 5


def test_older_sessions_take_the_slots_of_younger_ones():
    """Five conversations in four slots: the oldest one's second turn does not wait."""

    async def work(scheduler):
        ends = []

        async def ask(prompt, tokens, session):
            done = await scheduler.complete(S.request(prompt, tokens, session=session, seed=4))
            ends.append(session)
            return done

        first = await ask(S.prompt(9), 2, "old")
        young = [asyncio.create_task(ask(S.prompt(5, i), 60, f"young {i}")) for i in range(4)]
        while scheduler.counters.running < 4:
            await asyncio.sleep(0)
        prompt = np.concatenate([S.prompt(9), first.ids, S.prompt(4)])
        await ask(prompt, 5, "old")
        return ends, await asyncio.gather(*young), scheduler.counters

    ends, young, counters = S.run(work)
    assert ends[:2] == ["old", "old"] and counters.preemptions == 1

    async def undisturbed(scheduler):
        return [
            await scheduler.complete(S.request(S.prompt(5, i), 60, seed=4)) for i in range(4)
        ]

    for one, other in zip(young, S.run(undisturbed), strict=True):
        same(one, other)


@pytest.mark.parametrize("restart", [False, True])
def test_no_request_spans_two_versions_and_the_new_one_is_as_a_cold_engine(restart):
    request = S.request(S.prompt(9), 40, seed=1, session="s")

    async def work(scheduler):
        running = asyncio.create_task(scheduler.complete(request))
        while not scheduler.counters.running:
            await asyncio.sleep(0)
        await scheduler.swap(S.params(seed=1), 3, restart=restart)
        assert scheduler.version == 3 and scheduler.counters.cached_bytes == 0
        return await running, await scheduler.complete(request)

    during, after = S.run(work)
    old, new = (S.run(lambda s: s.complete(request), seed=seed) for seed in (0, 1))
    assert during.version == (3 if restart else 0) and after.version == 3
    same(during, new if restart else old)
    same(after, new)
    assert after.first == 0 and old.ids.tolist() != new.ids.tolist()


def test_versions_only_rise():
    with pytest.raises(UserError, match="version 0 after version 0; expected a higher one"):
        S.run(lambda scheduler: scheduler.swap(S.params(), 0))


def test_an_engine_that_fails_is_an_error_of_every_request_and_of_later_ones():
    async def work(scheduler):
        scheduler._rounds.params = {}
        tasks = [scheduler.complete(S.request([1], 5)) for _ in range(3)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        done += await asyncio.gather(scheduler.complete(S.request([1])), return_exceptions=True)
        return done

    for error in S.run(work):
        assert isinstance(error, ClosedError) and "the engine has ended" in str(error)


def test_weights_that_hold_nan_are_an_error_of_the_request():
    async def work(scheduler):
        nan = jax.tree.map(lambda x: x * np.float32("nan"), S.params())
        await scheduler.swap(nan, 1)
        done = await asyncio.gather(
            scheduler.complete(S.request(S.prompt(9))), return_exceptions=True
        )
        await scheduler.swap(S.params(), 2)
        return done[0], await scheduler.complete(S.request(S.prompt(9), 4))

    error, after = S.run(work)
    assert isinstance(error, UserError) and "the weights of version 1 hold NaN" in str(error)
    assert np.isfinite(after.logprobs).all()


def test_a_mixed_load_compiles_nothing_after_warm_up():
    async def load(scheduler, first, last):
        async def talk(i):
            stream = S.prompt(1 + 7 * i % 60, i)
            for turn in range(3):
                session = f"s{i}" if i % 3 else ""
                asked = S.request(
                    stream, 1 + (i + turn) % 9, session=session, seed=i, stops=[i % 64],
                    temperature=i % 3 / 2, top_k=i % 5, top_p=1 - i % 4 / 10,
                )  # fmt: skip
                done = await scheduler.complete(asked)
                stream = np.concatenate([stream, done.ids, S.prompt(1 + i % 11, turn)])

        await asyncio.gather(*map(talk, range(first, last)))

    async def work(scheduler):
        await load(scheduler, 0, 20)
        warm = scheduler.counters.compilations
        await load(scheduler, 20, 100)
        return warm, scheduler.counters

    warm, counters = S.run(work, S.OPTIONS.model_copy(update={"cache_mb": 1}))
    assert counters.compilations == warm and counters.evictions > 0
