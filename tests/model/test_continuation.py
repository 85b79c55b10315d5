"""A sequence cut into calls, packed into rows, or routed by hand is the same sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.model.cache import empty_cache
from t1jax.model.qwen3_5 import bind

from . import golden as G

NAME = "ref-a"
CAPACITY = 160


@functools.cache
def caller(T: int):
    """Jitted (params, tokens [1, T], how many are real, cache) -> Output; one program per T."""
    module, _ = G.model(NAME)
    run = G.execution()

    @jax.jit
    def call(params, tokens, count, cache, replay):
        real = (jnp.arange(T) < count).astype(jnp.int32)[None]
        return bind(module, params)(tokens, segments_BT=real, run=run, cache=cache, replay=replay)

    return call


def in_pieces(tokens, pieces, replay=None):
    """Feeds pieces one after another, each padded to a power of two; returns hidden and cache."""
    module, params = G.model(NAME)
    cache = empty_cache(module.config, 1, CAPACITY, "float32")
    hidden, routes, start = [], [], 0
    for count in pieces:
        T = 1 << (count - 1).bit_length()
        piece = np.zeros((1, T), np.int32)
        piece[0, :count] = tokens[start : start + count]
        mine = None
        if replay is not None:
            ids = np.zeros((replay.shape[0], 1, T, replay.shape[-1]), np.int32)
            ids[:, 0, :count] = replay[:, start : start + count]
            mine = G.replay(ids)
        out = caller(T)(params, piece, count, cache, mine)
        cache, start = out.cache, start + count
        hidden.append(np.asarray(out.hidden_BTD[0, :count]))
        routes.append(np.asarray(out.routes_LBTC[:, 0, :count]))
    return np.concatenate(hidden), np.concatenate(routes, axis=1), cache


SPLITS = [
    (2, 2, 1, 1, 1, 1), (1, 1, 1), (63, 1, 64, 1), (65, 1, 1, 62), (64, 64, 3), (128, 1, 1, 1),
    (5, 1, 60, 1, 1, 63),
]  # fmt: skip


@pytest.mark.parametrize("pieces", SPLITS, ids=str)
@pytest.mark.parametrize("forced", [False, True], ids=["live", "forced"])
def test_any_split_equals_one_shot(pieces, forced):
    g = G.golden(NAME)
    N = sum(pieces)
    tokens = g.tokens[0]
    replay = g.forced[:, 0] if forced else None
    whole, whole_routes, whole_cache = in_pieces(tokens, (N,), replay)
    parts, part_routes, part_cache = in_pieces(tokens, pieces, replay)
    np.testing.assert_allclose(parts, whole, atol=1e-3)
    assert np.abs(parts - whole).mean() < 3e-5
    np.testing.assert_array_equal(part_routes, whole_routes)
    assert part_cache.length_B.tolist() == whole_cache.length_B.tolist() == [N]
    for a, b in zip(jax.tree.leaves(part_cache), jax.tree.leaves(whole_cache), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)


def test_rows_of_a_cached_batch_do_not_touch_each_other():
    g, (module, params) = G.golden(NAME), G.model(NAME)
    alone, _, _ = in_pieces(g.tokens[3], (9, 1))
    run = G.execution()
    call = jax.jit(
        lambda params, tokens, real, cache: bind(module, params)(
            tokens, segments_BT=real, run=run, cache=cache
        )
    )
    cache = empty_cache(module.config, 4, CAPACITY, "float32")
    counts = np.asarray([16, 3, 12, 9])
    real = (np.arange(16) < counts[:, None]).astype(np.int32)
    out = call(params, g.tokens[:, :16], real, cache)
    following = g.tokens[np.arange(4), counts][:, None]
    step = call(params, following, np.ones((4, 1), np.int32), out.cache)
    np.testing.assert_allclose(out.hidden_BTD[3, :9], alone[:9], atol=1e-4)
    np.testing.assert_allclose(step.hidden_BTD[3, 0], alone[9], atol=1e-4)
    assert step.cache.length_B.tolist() == [17, 4, 13, 10]


@functools.cache
def packed_and_apart():
    g, (module, params) = G.golden(NAME), G.model(NAME)
    parts = [g.tokens[0, :37], g.tokens[1, :51], g.tokens[2, :40]]
    row = np.concatenate(parts)[None]
    segments = np.repeat([1, 2, 3], [37, 51, 40])[None].astype(np.int32)
    apart, apart_mask = np.zeros((3, 51), np.int32), np.zeros((3, 51), np.int32)
    for i, part in enumerate(parts):
        apart[i, : len(part)], apart_mask[i, : len(part)] = part, 1
    run = G.execution()

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(params, tokens, segments):
        out = bind(module, params)(tokens, segments_BT=segments, run=run)
        scale = jnp.sin(jnp.arange(out.hidden_BTD.shape[-1], dtype=jnp.float32))
        return jnp.sum(out.hidden_BTD * scale, where=segments[..., None] > 0), out

    packed = gradient(params, row, segments)
    return packed, gradient(params, apart, apart_mask), apart_mask


def test_packed_segments_equal_separate_rows():
    (_, packed), (_, apart), mask = packed_and_apart()
    got = np.asarray(packed.hidden_BTD)[0]
    want = np.asarray(apart.hidden_BTD)[mask > 0]
    np.testing.assert_allclose(got, want, atol=1e-3)
    assert np.abs(got - want).mean() < 3e-5
    first = np.isin(np.arange(128), [0, 1, 2, 37, 38, 39, 88, 89, 90])
    np.testing.assert_allclose(got[first], want[first], atol=1e-4)  # the convolution's reach
    np.testing.assert_array_equal(packed.routes_LBTC[:, 0], apart.routes_LBTC[:, mask > 0])


def test_gradients_of_packed_segments_equal_those_of_separate_rows():
    (packed, _), (apart, _), _ = packed_and_apart()
    packed, apart = jax.tree.map(np.asarray, (packed, apart))
    errors = jax.tree.leaves(jax.tree.map(G.relative, packed, apart))
    assert max(errors) < 2e-4  # the reference's own reordering noise is 3e-4


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    g, (_, params) = G.golden(NAME), G.model(NAME)
    row, pad = g.tokens[:1, :64], np.zeros((1, 7), np.int32)
    order = (lambda a, b: [b, a]) if side == "left" else (lambda a, b: [a, b])
    tokens = np.concatenate(order(row, pad), axis=1)
    mask = np.concatenate(order(np.ones_like(row), pad), axis=1)
    evaluate = G.evaluator(NAME, G.execution())
    plain = evaluate(params, row, np.ones_like(row), None)[0]
    padded = evaluate(params, tokens, mask, None)[0]
    np.testing.assert_allclose(padded[mask > 0], plain[0], atol=1e-3)


def test_forcing_routes_in_one_layer_alone_changes_the_logits():
    g, (module, params) = G.golden("ref-b"), G.model("ref-b")
    evaluate = G.evaluator("ref-b", G.execution())
    live, _, out = evaluate(params, g.tokens, g.mask, None)
    natural = np.asarray(out.routes_LBTC)
    same, *_ = evaluate(params, g.tokens, g.mask, G.replay(natural.astype(np.int32)))
    np.testing.assert_array_equal(same, live)  # bit for bit
    for layer in range(module.config.layers):
        ids = natural.astype(np.int32)
        ids[layer] = g.forced[layer]
        changed, _, out = evaluate(params, g.tokens, g.mask, G.replay(ids))
        assert np.abs(changed - live)[g.mask > 0].max() > 1e-2
        np.testing.assert_array_equal(
            np.asarray(out.routes_LBTC)[layer][g.mask > 0], g.forced[layer][g.mask > 0]
        )


def test_each_layer_consumes_its_own_row_of_the_routes():
    g, (_, params) = G.golden("ref-b"), G.model("ref-b")
    layers, (B, T), C, E = 8, g.tokens.shape, 4, 16
    l, t, j = np.ogrid[:layers, :T, :C]  # noqa: E741
    ids = np.broadcast_to(((7 * l + 13 * t + j) % E)[:, None], (layers, B, T, C))
    _, _, out = G.evaluator("ref-b", G.execution())(params, g.tokens, g.mask, G.replay(ids))
    np.testing.assert_array_equal(out.routes_LBTC, ids)


def test_bfloat16_under_replay_is_close_in_the_mean():
    g, (_, params) = G.golden("ref-b"), G.model("ref-b")
    routes = G.replay(g.forced)
    _, want, _ = G.evaluator("ref-b", G.execution())(params, g.tokens, g.mask, routes)
    evaluate = G.evaluator("ref-b", G.execution(dtype="bfloat16"))
    _, got, _ = evaluate(params, g.tokens, g.mask, routes)
    assert np.abs(np.asarray(got) - want)[g.mask[:, 1:] > 0].mean() < 0.2
