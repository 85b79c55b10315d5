"""Attention that reads a cache block by block is a softmax over what each query may see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.model import attention
from t1jax.model.attention import KeyValues, Placed, attend_cache
from t1jax.model.execution import default_execution
from t1jax.model.sharding import make_mesh

GROUPS, B, K, G, H = 2, 4, 2, 2, 8
NEWEST = [0, 9, 37, 99]  # newest column that each row's last query sees


def plain(q, k, v, columns):
    """One row, one query after another, in float64."""
    out = np.zeros(q.shape)
    for t, column in enumerate(columns):
        for n in range(q.shape[1]):
            keys, values = (x[: column + 1, n // G].astype(np.float64) for x in (k, v))
            scores = keys @ q[t, n] / np.sqrt(H)
            weights = np.exp(scores - scores.max())
            out[t, n] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize("block", [100, 32, 7])  # whole; a last block that overlaps
@pytest.mark.parametrize("mesh", ["", "data=2,tensor=2"])
def test_blocks_of_a_cache_are_one_softmax(block, mesh, monkeypatch):
    monkeypatch.setattr(attention, "CACHE_BLOCK", block)
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    q, k, v = draw(B, 3, K * G, H), draw(GROUPS, B, 100, K, H), draw(GROUPS, B, 100, K, H)
    for row, newest in enumerate(NEWEST):  # what an earlier owner of the row left
        k[:, row, newest + 1 :] = v[:, row, newest + 1 :] = np.nan
    columns = np.maximum(np.array(NEWEST)[:, None] + np.arange(-2, 1), 0)
    segments = np.ones((B, 3), np.int32)
    segments[1, 2] = 0  # padding: its output means nothing, and must be finite
    run = default_execution(
        make_mesh(mesh, None if mesh else jax.devices()[:1]), dtype="float32"
    )
    placed = Placed(jnp.asarray(columns, jnp.int32), jnp.asarray(segments))
    got = jax.jit(lambda *x: attend_cache(*x, run))(q, KeyValues(k, v), jnp.int32(1), placed)
    assert np.isfinite(got).all()
    for row in range(B):
        want = plain(q[row], k[1, row], v[1, row], columns[row])
        real = segments[row] > 0
        np.testing.assert_allclose(np.asarray(got)[row][real], want[real], atol=1e-5)
