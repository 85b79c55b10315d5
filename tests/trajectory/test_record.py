"""The record's invariants, its routes, and what a recorder makes of turns."""

import dataclasses

import numpy as np
import pytest

from t1jax.errors import UserError
from t1jax.trajectory import routes
from t1jax.trajectory.record import Ending, Finish, LogprobKind, RouteShape, Rule, Sampling, Turn
from t1jax.trajectory.recorder import Recorder

from .made import ENDING, SHAPE, rows, same, turn, two_turns


def changed(**columns):
    """The chunk of two_turns with other values in some places: name = {index: value}."""
    (chunk,) = two_turns().chunks
    copies = {}
    for name, places in columns.items():
        copies[name] = getattr(chunk, name).copy()
        for place, value in places.items():
            copies[name][place] = value
    return dataclasses.replace(chunk, **copies)


def test_columns_describe_their_own_token():
    (chunk,) = two_turns().chunks
    assert chunk.ids.tolist() == [10, 11, 12, 20, 21, 13, 14, 22, 23]
    assert chunk.mask.astype(int).tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert chunk.logprobs.tolist() == [0, 0, 0, -0.125, -0.25, 0, 0, -0.125, -0.25]
    assert chunk.versions.tolist() == [3, 3, 3, 3, 3, 4, 4, 4, 4]
    assert chunk.routes.dtype == np.uint8
    np.testing.assert_array_equal(chunk.routes, rows(0, 8))
    assert chunk.recorded.all()
    assert chunk.turns == (
        Turn(begin=0, sampled=3, end=5, rule=Rule.opening, finish=Finish.stop),
        Turn(begin=5, sampled=7, end=9, rule=Rule.strict, finish=Finish.stop),
    )


def test_prompt_3_and_completion_2_have_4_rows():
    recorder = Recorder(SHAPE)
    turn(recorder, [1, 2, 3], [4, 5])
    (chunk,) = recorder.finish(ENDING).chunks
    assert chunk.routes.shape == (4, 8, 8)
    assert chunk.routes[2, 5].tolist() == [(7 * 5 + 13 * 2 + j) % 64 for j in range(8)]


def test_the_row_of_a_turns_last_token_comes_from_the_next_turn():
    """Turn 1: 4 tokens, 3 rows. Turn 2's prompt has 7 tokens beginning with them."""
    recorder = Recorder(SHAPE)
    recorder.append_context(np.array([1, 2]))
    recorder.append_sampled(np.array([3, 4]), np.array([-1, -1]), version=0, finish=Finish.stop)
    recorder.record_routes(0, rows(0, 3))
    recorder.append_context(np.array([5, 6, 7]))
    recorder.append_sampled(np.array([8]), np.array([-1]), version=0, finish=Finish.stop)
    again = rows(0, 7)
    again[:3] += 1  # read again after an eviction: the first reading stays
    recorder.record_routes(0, again)
    (chunk,) = recorder.finish(ENDING).chunks
    np.testing.assert_array_equal(chunk.routes, rows(0, 7))

    early, late = (rows(0, 3), np.ones(3, bool)), (again, np.ones(7, bool))
    merged, recorded = routes.merge(early, late)
    np.testing.assert_array_equal(merged, rows(0, 7))
    assert recorded.all()


def test_rows_never_read_are_marked_and_later_filled():
    recorder = Recorder(SHAPE)
    turn(recorder, [1, 2, 3], [4, 5])
    recorder.append_context(np.array([6]))
    recorder.append_sampled(np.array([7]), np.array([-1]), version=0, finish=Finish.stop)
    recorder.record_routes(5, rows(5, 6))
    assert recorder.finish(ENDING).chunks[0].recorded.tolist() == [True] * 4 + [False, True]


@pytest.mark.parametrize(("length", "sampled"), [(8, 2), (4, 0)])
def test_a_cut_keeps_columns_in_place(length, sampled):
    """10 tokens, prompt 6."""
    recorder = Recorder(SHAPE)
    turn(recorder, [1, 2, 3, 4, 5, 6], [7, 8, 9, 10])
    (whole,) = recorder.finish(ENDING).chunks
    cut = whole.truncated(length)
    np.testing.assert_array_equal(cut.routes, rows(0, length - 1))
    assert cut.ids.tolist() == list(range(1, length + 1))
    assert cut.sampled_tokens == sampled
    assert [t.finish for t in cut.turns] == [Finish.length] * (sampled > 0)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"mask": {5: True}}, "token 5 is marked as sampled"),
        ({"logprobs": {3: np.nan}}, r"token 3 \(sampled\) has log-prob nan"),
        ({"logprobs": {3: -np.inf}}, r"token 3 \(sampled\) has log-prob -inf"),
        ({"logprobs": {3: 0.5}}, "token 3"),
        ({"logprobs": {6: -0.5}}, r"token 6 \(not sampled\) has log-prob -0.5; expected 0"),
        ({"logprobs": {6: np.nan}}, "token 6"),
        ({"versions": {6: 2}}, "token 6 was sampled by weight version 2"),
        ({"versions": {0: -1}}, "token 0"),
        ({"ids": {1: -5}}, "token 1 has id -5"),
        ({"routes": {(4, 6): [7, 7, 1, 2, 3, 4, 5, 6]}}, "token 4, layer 6 names an expert twice"),
        ({"routes": {(4, 6, 3): 64}}, r"token 4, layer 6 names an expert outside 0..63"),
        ({"routes": {(t, 6): 0 for t in range(8)}}, "layer 6 is 0 from token 0 on"),
        ({"routes": {(2, 1): 255}}, "token 2, layer 1 names an expert outside"),
    ],
)
def test_what_cannot_have_happened_is_refused(columns, said):
    with pytest.raises((UserError, ValueError), match=said):
        changed(**columns)


def test_a_probability_of_1_is_kept():
    assert changed(logprobs={3: 0.0}).mask[3]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("routes", rows(0, 9), r"has routes of shape \[9, 8, 8\], uint8; expected \[8, 8, 8\]"),
        ("routes", rows(0, 8).astype(np.int64), "int64; expected"),
        ("mask", np.ones(8, bool), "9 tokens has mask of shape"),
        ("ids", np.arange(9), "int64; expected"),
        ("turns", (Turn(begin=0, sampled=3, end=12, rule=Rule.opening, finish=Finish.stop),),
         "turn 0 covers 0..3..12"),
    ],
)  # fmt: skip
def test_columns_of_another_length_or_type_are_refused(name, value, said):
    with pytest.raises(UserError, match=said):
        dataclasses.replace(two_turns().chunks[0], **{name: value})


def test_a_record_cannot_be_changed():
    (chunk,) = two_turns().chunks
    with pytest.raises(ValueError, match="read-only"):
        chunk.ids[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        chunk.ids = chunk.mask


def test_filtered_logprobs_are_refused_where_raw_ones_are_needed():
    raw = two_turns().chunks[0]
    np.testing.assert_array_equal(raw.raw_logprobs(), raw.logprobs)
    sampling = Sampling(top_p=0.9)
    filtered = two_turns(sampling=sampling, logprob_kind=LogprobKind.filtered).chunks[0]
    with pytest.raises(UserError, match=r"are filtered \(top_p 0.9"):
        filtered.raw_logprobs()


@pytest.mark.parametrize("experts", [2, 256, 257, 65536, 65537])
def test_ids_take_the_smallest_unsigned_type(experts):
    expected = {2: "u1", 256: "u1", 257: "u2", 65536: "u2", 65537: "u4"}[experts]
    assert routes.dtype_for(experts) == np.dtype(expected)


def test_a_row_of_minus_one_is_missing_and_never_an_expert():
    signed = rows(0, 4).astype(np.int64)
    signed[1] = -1
    signed[2, 5] = -1  # one layer of a token: the token is missing
    ids, recorded = routes.split_missing(signed, 64)
    assert recorded.tolist() == [True, False, False, True]
    assert ids.dtype == np.uint8
    np.testing.assert_array_equal(ids[[0, 3]], rows(0, 4)[[0, 3]])


@pytest.mark.parametrize(
    ("row", "experts", "said"),
    [
        ([3, -1, 5, 7], 256, "token 1, layer 2 names only some of its experts"),
        ([7, 7, 1, 2], 256, "token 1, layer 2 names an expert twice"),
        ([0, 256, 1, 2], 256, r"token 1, layer 2 names an expert outside 0..255"),
        ([0, -2, 1, 3], 256, "token 1, layer 2 names an expert outside"),
        ([255] * 4, 256, "token 1, layer 2 names an expert twice"),  # what -1 becomes in uint8
    ],
)
def test_routes_that_no_router_chose_are_refused(row, experts, said):
    signed = np.tile(np.arange(4), (3, 4, 1))
    signed[1, 2] = row
    with pytest.raises(ValueError, match=said):
        routes.split_missing(signed, experts)


def test_checking_routes_agrees_with_a_loop():
    random = np.random.default_rng(0)
    for C in (1, 2, 3, 8):
        ids = random.integers(1, 40, (5000, 3, C)).astype(np.uint8)
        recorded = random.random(5000) < 0.5
        bad = [
            (t, layer)
            for t in range(5000)
            for layer in range(3)
            if recorded[t] and len(set(ids[t, layer].tolist())) < C
        ]
        if not bad:
            routes.check(ids, recorded, 40)
            continue
        with pytest.raises(ValueError, match=rf"token {bad[0][0]}, layer {bad[0][1]} names"):
            routes.check(ids, recorded, 40)
        recorded[[t for t, _ in bad]] = False
        routes.check(ids, recorded, 40)


def test_one_choice_per_token_may_be_expert_0_for_a_while():
    routes.check(np.zeros((5, 2, 1), np.uint8), np.ones(5, bool), 4)
    with pytest.raises(ValueError, match="layer 0 is 0"):
        routes.check(np.zeros((64, 2, 1), np.uint8), np.ones(64, bool), 4)


@pytest.mark.parametrize(
    ("first", "ids", "said"),
    [
        (0, rows(0, 6), "the row count does not match"),
        (0, np.moveaxis(rows(0, 4), 0, 1), "token, layer, choice"),
        (1, rows(1, 3).astype(int) * 0 + 64, "token 1, layer 0 names an expert outside"),
    ],
)
def test_routes_that_do_not_fit_the_stream_are_refused(first, ids, said):
    recorder = Recorder(SHAPE)
    recorder.append_context(np.arange(5))
    with pytest.raises((UserError, ValueError), match=said):
        recorder.record_routes(first, ids)


def test_a_model_without_experts_has_no_routes():
    recorder = Recorder(RouteShape(layers=0, chosen=0, experts=0))
    recorder.append_context(np.array([1, 2]))
    recorder.append_sampled(np.array([3]), np.array([-1]), version=0, finish=Finish.length)
    (chunk,) = recorder.finish(ENDING).chunks
    assert chunk.routes.shape == (2, 0, 0)
    assert chunk.missing_rows == 2


def test_what_was_sampled_cannot_be_dropped():
    recorder = Recorder(SHAPE)
    turn(recorder, [1, 2], [3, 4])
    recorder.append_context(np.array([5, 6]))
    recorder.drop_context(5)
    with pytest.raises(UserError, match="a stream is append-only"):
        recorder.drop_context(3)


def test_a_dropped_token_takes_its_route_along():
    recorder = Recorder(SHAPE)
    turn(recorder, [1, 2], [3, 4])
    recorder.append_context(np.array([5, 6]))
    recorder.record_routes(3, rows(3, 6))
    recorder.drop_context(5)
    recorder.append_context(np.array([7, 8]))
    recorder.append_sampled(np.array([9]), np.array([-1]), version=0, finish=Finish.stop)
    (chunk,) = recorder.finish(ENDING).chunks
    assert chunk.recorded.tolist() == [True] * 5 + [False, False]
    assert not chunk.routes[5:].any()


def test_context_before_the_first_completion_is_all_opening():
    recorder = Recorder(SHAPE)
    recorder.append_context(np.array([1]))
    recorder.append_context(np.array([2]))
    turn(recorder, [3], [4])
    assert recorder.finish(ENDING).boundaries == {
        "strict": 0, "normalised": 0, "retokenised": 0, "split": 0
    }  # fmt: skip


def test_a_turn_counts_under_the_worst_of_its_joints():
    recorder = Recorder(SHAPE)
    turn(recorder, [1], [2])
    for rule in (Rule.strict, Rule.normalised, Rule.strict):
        recorder.append_context(np.array([3]), rule=rule)
    turn(recorder, [4], [5])
    assert recorder.finish(ENDING).boundaries["normalised"] == 1


def test_an_ungraded_trial_has_no_reward():
    assert Ending(task="a/b", outcome="infra_error", reward=None).reward is None
    with pytest.raises(UserError, match="has reward nan"):
        Ending(task="a/b", outcome="solved", reward=float("nan"))
    for bad in ({"timings": {"agent": float("inf")}}, {"details": {"passed": {1, 2}}}):
        with pytest.raises(UserError, match="JSON cannot hold"):
            Ending(task="a/b", outcome="solved", reward=1.0, **bad)


@pytest.mark.parametrize(
    "bad", [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_k": -1}]
)
def test_sampling_that_cannot_be_is_refused(bad):
    with pytest.raises(UserError, match=f"sampling.{next(iter(bad))} is"):
        Sampling(**bad)


def test_replaying_the_events_makes_the_same_record():
    events = []
    original = two_turns(listener=lambda *event: events.append(event))
    copy = Recorder(SHAPE)
    for event in events:
        copy.replay(*event)
    assert same(copy.finish(ENDING), original)
