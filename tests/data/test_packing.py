"""The one shift to next-token form, and who stands in which row."""

import dataclasses

import numpy as np
import pytest

from t1jax.data.packing import (
    NO_ROUTES,
    arrange,
    efficiency,
    fill,
    last_columns,
    pack_rows,
    pieces_of,
    plan,
)
from t1jax.errors import UserError

from . import made


def packed(trajectories, *, tokens=16, rows=1, packs=True, shape=made.SHAPE):
    named = [(f"t{i}", t) for i, t in enumerate(trajectories)]
    pieces, _ = pieces_of(named, tokens=tokens, too_long="error")
    lengths = [len(piece.chunk) for piece in pieces]
    plans = arrange(lengths, tokens=tokens, rows=rows, packed=packs, unit=4)
    return [fill(micro, pieces, shape) for micro in plans]


def test_a_column_is_an_input_and_what_follows_it():
    """3 given, 2 sampled, 2 of tool output; pad id 0 is a real id as well."""
    (batch,) = packed([made.trajectory(7, prompt=3, tail=2, first_id=0)], tokens=8)
    assert batch.tokens_BT.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0]]
    assert batch.targets_BT.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0]]
    assert batch.segments_BT.tolist() == [[1, 1, 1, 1, 1, 1, 1, 0]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0]]
    assert batch.mask_BT.tolist() == [[0, 0, 1, 1, 0, 0, 0, 0]]
    assert batch.sampler_logprobs_BT.tolist() == [[0, 0, -0.125, -0.25, 0, 0, 0, 0]]
    # The last token is tool output: the reward sits on the last sampled one, as float32.
    assert batch.rewards_BT.tolist() == [[0, 0, 0, 0.5, 0, 0, 0, 0]]
    assert batch.rewards_BT.dtype == np.float32


def test_routes_stay_in_their_inputs_column_and_the_last_token_has_none():
    (batch,) = packed([made.trajectory(5), made.trajectory(4, first_id=50)], tokens=12)
    assert batch.ids_LBTC.dtype == np.uint8 and batch.ids_LBTC.shape == (3, 1, 12, 3)
    for layer in range(3):
        np.testing.assert_array_equal(batch.ids_LBTC[layer, 0, :4], made.routes(0, 4)[:, layer])
        np.testing.assert_array_equal(batch.ids_LBTC[layer, 0, 5:8], made.routes(0, 3)[:, layer])
    assert batch.recorded_BT.tolist() == [[1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0]]
    assert batch.complete
    # What was not recorded names C distinct experts all the same: a plan can be made of it.
    assert all(len(set(row)) == 3 for row in batch.ids_LBTC.reshape(-1, 3).tolist())


def test_a_missing_row_is_a_mask_and_makes_routes_incomplete():
    whole = made.trajectory(5)
    known = np.array([True, False, True, True])
    chunk = dataclasses.replace(whole.chunks[0], recorded=known)
    (batch,) = packed([dataclasses.replace(whole, chunks=(chunk,))], tokens=6)
    assert batch.recorded_BT.tolist() == [[1, 0, 1, 1, 0, 0]]
    assert not batch.complete


def test_packed_pieces_are_as_they_are_alone():
    lengths = [5, 9, 3, 7, 4]
    whole = [made.trajectory(n, first_id=100 * i + 7) for i, n in enumerate(lengths)]
    rows = packed(whole, tokens=16, rows=2)
    alone = packed(whole, tokens=16, packs=False)
    cut = {}
    for batch in rows:
        for b, segments in enumerate(batch.segments_BT):
            for segment in range(1, segments.max() + 1):
                at = np.flatnonzero(segments == segment)
                cut[int(batch.tokens_BT[b, at[0]])] = batch, b, at
    assert len(cut) == 5
    for want in alone:
        N = int((want.segments_BT > 0).sum())
        batch, b, at = cut[int(want.tokens_BT[0, 0])]
        for field in dataclasses.fields(batch):
            if field.name == "segments_BT":
                continue
            got, wanted = getattr(batch, field.name), getattr(want, field.name)
            if field.name == "ids_LBTC":  # but the last token's, which means nothing
                got, wanted = got[:, b, at[:-1]], wanted[:, 0, : N - 1]
            else:
                got, wanted = got[b, at], wanted[0, :N]
            np.testing.assert_array_equal(got, wanted, err_msg=field.name)


def test_best_fit_decreasing_by_hand():
    assert pack_rows([3, 5, 4, 2, 1], 8) == [[1, 0], [2, 3, 4]]


def test_a_long_tailed_mix_fills_its_rows():
    lengths = np.minimum(np.random.default_rng(0).lognormal(8, 1.2, 512), 65536).astype(int) + 2
    plans = arrange(lengths.tolist(), tokens=86016, rows=1, packed=True)
    assert sorted(n for micro in plans for row in micro.rows for n in row) == list(range(512))
    assert max(sum(lengths[list(row)]) for micro in plans for row in micro.rows) <= 86016
    assert efficiency(plans, lengths.tolist()) > 0.95


def test_lengths_of_one_kind_make_at_most_two_programs():
    plans = arrange(range(1000, 1101), tokens=86016, rows=4, packed=False)
    assert len({micro.columns for micro in plans}) <= 2
    assert len({len(micro.rows) for micro in plans}) == 1


def test_rows_of_a_process_are_those_of_the_whole():
    named = [(str(i), made.trajectory(n, first_id=10 * i)) for i, n in enumerate((5, 6, 7, 4))]
    pieces, _ = pieces_of(named, tokens=8, too_long="error")
    (micro,) = arrange([5, 6, 7, 4], tokens=8, rows=4, packed=True)
    whole = fill(micro, pieces, made.SHAPE)
    part = fill(micro, pieces, made.SHAPE, slice(2, 4))
    np.testing.assert_array_equal(part.tokens_BT, whole.tokens_BT[2:])
    np.testing.assert_array_equal(part.ids_LBTC, whole.ids_LBTC[:, 2:])


def test_a_plan_sends_every_copy_of_a_real_token_to_its_expert():
    (batch,) = packed([made.trajectory(5)], tokens=8)
    order_R, sizes_E, _ = plan(batch, 16, {"row_padding": 0})
    flat = batch.ids_LBTC.reshape(3, -1)
    for layer in range(3):
        copies = order_R[layer, 0][: 5 * 3]
        np.testing.assert_array_equal(flat[layer, copies], np.sort(flat[layer, : 5 * 3]))
    assert sizes_E.sum() == 3 * 5 * 3


def test_long_routes_are_copied_once_in_their_small_type():
    """131,072 tokens x 48 layers x 8: 50 MB recorded, at most as much again when packed."""
    shape = dataclasses.replace(made.SHAPE, layers=48, chosen=8, experts=256)
    one = made.trajectory(4096, shape=shape)
    (batch,) = packed([one] * 2, tokens=8192, shape=shape)
    assert batch.ids_LBTC.nbytes == 48 * 8192 * 8
    np.testing.assert_array_equal(
        batch.ids_LBTC[47, 0, 4096:8191], made.routes(0, 4095, shape)[:, 47]
    )


def test_what_cannot_be_packed_is_refused_by_name():
    def take(trajectory, **options):
        call = {"tokens": 8, "too_long": "error", **options}
        return pieces_of([("run/a", trajectory)], **call)

    with pytest.raises(UserError, match=r"run/a, chunk 0 has 9 tokens and a row holds 8"):
        take(made.trajectory(9))
    assert take(made.trajectory(9), too_long="leave_out")[1]["too_long"] == 1
    with pytest.raises(UserError, match=r"run/a ended as infra_error and has no reward"):
        take(made.trajectory(5, reward=None, outcome="infra_error"))
    with pytest.raises(UserError, match=r"begins with a sampled token"):
        take(made.trajectory(5, prompt=0))
    with pytest.raises(UserError, match=r"3 layers with 3 of 16 .* 4 layers"):
        packed([made.trajectory(5)], shape=dataclasses.replace(made.SHAPE, layers=4))
    (batch,) = packed([made.trajectory(5)], shape=NO_ROUTES)
    assert batch.ids_LBTC.size == 0


def test_last_columns():
    segments_BT = np.array([[1, 1, 2, 0], [1, 1, 1, 1]])
    assert last_columns(segments_BT).tolist() == [[0, 1, 1, 0], [0, 0, 0, 1]]
