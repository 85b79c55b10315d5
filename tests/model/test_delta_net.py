"""The delta net against its recurrence, written as a plain loop in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.model import delta_net as D
from t1jax.model.layers import l2_norm

from . import golden as G

J, I, X, Y = 2, 4, 8, 6  # noqa: E741


def recurrence(q, k, v, beta, g, segments):
    """o_t = S^T q_t with S = e^g S; S += k (beta (v - S^T k))^T; S = 0 at each segment's start."""
    B, T = segments.shape
    out, state = np.zeros((B, T, I, Y)), np.zeros((B, I, X, Y))
    unit = lambda x: x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    for b in range(B):
        current = 0
        for t in range(T):
            if segments[b, t] == 0:
                continue
            if segments[b, t] != current:
                current, state[b] = segments[b, t], 0
            for i in range(I):
                kt, qt = unit(k[b, t, i // (I // J)]), unit(q[b, t, i // (I // J)]) * X**-0.5
                S = np.exp(g[b, t, i]) * state[b, i]
                S = S + np.outer(kt, beta[b, t, i] * (v[b, t, i] - S.T @ kt))
                out[b, t, i], state[b, i] = S.T @ qt, S
    return out, state


def inputs(segments, seed=0):
    rng = np.random.default_rng(seed)
    B, T = segments.shape
    real = (segments > 0)[..., None]
    shapes = [(B, T, J, X), (B, T, J, X), (B, T, I, Y)]
    q, k, v = (rng.normal(size=s) * real[..., None] for s in shapes)
    beta = rng.uniform(0.1, 1, (B, T, I)) * real
    return q, k, v, beta, -rng.exponential(0.3, (B, T, I)) * real


def mix(arrays, segments, **changes):
    run = G.execution(**changes)
    spans = D.Spans.of(jnp.asarray(segments, jnp.int32), continues=False)
    return D.mix(*(jnp.asarray(x, jnp.float32) for x in arrays), None, spans, run)


def packed(*lengths, pad=0, left=0):
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.concatenate([np.zeros(left, int), ids, np.zeros(pad, int)])[None]


CASES = {
    "one segment": packed(150),
    "shorter than a chunk": packed(5),
    "one chunk": packed(64),
    "a chunk and one": packed(65),
    "right padding": packed(63, pad=7),
    "left padding": packed(127, left=7),
    "packed": packed(37, 51, 40),
    "packed inside one chunk": packed(1, 2, 30, pad=3),
    "segments end with chunks": packed(64, 64, 32),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk", [16, 64])
def test_chunks_compute_the_recurrence(case, chunk):
    segments = CASES[case]
    arrays = inputs(segments)
    want, state = recurrence(*arrays, segments)
    got, last = mix(arrays, segments, chunk=chunk)
    real = segments[0] > 0
    np.testing.assert_allclose(got[0, real], want[0, real], atol=2e-5)
    np.testing.assert_allclose(last, state, atol=2e-5)


def test_one_step_computes_the_recurrence():
    segments = packed(6)
    arrays = inputs(segments)
    want, _ = recurrence(*arrays, segments)
    state = None
    for t in range(6):
        spans = D.Spans.of(jnp.ones((1, 1), jnp.int32), continues=t > 0)
        step = [jnp.asarray(x[:, t : t + 1], jnp.float32) for x in arrays]
        got, state = D.mix(*step, state, spans, G.execution())
        np.testing.assert_allclose(got[0, 0], want[0, t], atol=1e-5)


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("case", ["one segment", "packed", "left padding", "right padding"])
def test_state_crosses_shards_of_the_sequence(case, context):
    segments = CASES[case]
    segments = np.pad(segments, ((0, 0), (0, -segments.shape[1] % context)))
    arrays = inputs(segments)
    weight = np.random.default_rng(1).normal(size=(1, segments.shape[1], I, Y))
    weight *= (segments > 0)[..., None, None]

    def objective(arrays, mesh):
        got, last = mix(arrays, segments, mesh=mesh)
        return jnp.sum(got * weight) + jnp.sum(last**2)

    compute = jax.jit(jax.value_and_grad(objective), static_argnums=1)
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    want, wanted = compute(arrays, "")
    got, gradients = compute(arrays, f"context={context}")
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for a, b in zip(gradients, wanted, strict=True):
        assert G.relative(np.asarray(a), np.asarray(b)) < 1e-5


def test_a_long_sequence_in_chunks_equals_step_by_step():
    T = 65_600  # field case: far past any chunk's reach
    rng = np.random.default_rng(0)
    draw = lambda *s: jnp.asarray(rng.normal(size=(1, T, *s)), jnp.float32)  # noqa: E731
    arrays = draw(1, 4), draw(1, 4), draw(1, 4), jax.nn.sigmoid(draw(1)), -jnp.exp(draw(1) - 4)

    @jax.jit
    def stepwise(q, k, v, beta, g):
        spans = D.Spans.of(jnp.ones((1, 1), jnp.int32), continues=True)

        def step(state, x):
            out, state = D.one_step(*(a[:, None] for a in x), state, spans)
            return state, out

        q, k = l2_norm(q) * 4**-0.5, l2_norm(k)
        xs = [jnp.moveaxis(a, 1, 0) for a in (q, k, v, beta, g)]
        state, out = jax.lax.scan(step, jnp.zeros((1, 1, 4, 4)), xs)
        return jnp.moveaxis(out[:, :, 0], 0, 1), state

    want, state = stepwise(*arrays)
    spans = D.Spans.of(jnp.ones((1, T), jnp.int32), continues=False)
    got, last = jax.jit(lambda a: D.mix(*a, None, spans, G.execution()))(arrays)
    assert G.relative(np.asarray(got), np.asarray(want)) < 1e-5
    assert G.relative(np.asarray(last), np.asarray(state)) < 1e-5


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 64])
def test_unit_lower_inverse_and_its_gradient(size):
    rng = np.random.default_rng(size)
    A = np.tril(rng.normal(size=(3, size, size)), -1) * 0.3
    weight = rng.normal(size=A.shape)
    inverse = np.linalg.inv(np.eye(size) + A)
    got = D.unit_lower_inverse(jnp.asarray(A, jnp.float32))
    np.testing.assert_allclose(got, inverse, atol=1e-5)
    # d inverse = -inverse dA inverse
    transposed = np.swapaxes(inverse, 1, 2)
    want = np.tril(-transposed @ weight @ transposed, -1)
    got = jax.grad(lambda A: jnp.sum(D.unit_lower_inverse(A) * weight.astype(np.float32)))(
        jnp.asarray(A, jnp.float32)
    )
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_equal_keys_do_not_blow_up():
    segments = packed(128)
    q, k, v, beta, g = inputs(segments)
    arrays = q, np.ones_like(k), v, np.ones_like(beta), np.zeros_like(g)
    want, _ = recurrence(*arrays, segments)
    got, _ = mix(arrays, segments)
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_of_padding_are_finite_and_zero(side):
    segments = packed(70, **{"left" if side == "left" else "pad": 9})
    arrays = [jnp.asarray(x, jnp.float32) for x in inputs(segments)]
    real = segments[0] > 0

    def objective(arrays):
        out, state = mix(arrays, segments)
        return jnp.sum(out[:, real] ** 2) + jnp.sum(state)

    for gradient in jax.grad(objective)(arrays):
        assert np.isfinite(gradient).all()
    q, k, *_ = jax.grad(objective)(arrays)
    assert not np.asarray(q[:, ~real]).any() and not np.asarray(k[:, ~real]).any()
