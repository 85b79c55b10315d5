"""The router, its replay, plans and dispatch: small literal cases and a dumb oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.model import moe as M
from t1jax.model.grouped_matmul import ROW_PADDING, Stack, grouped_matmul

from . import golden as G


def test_gates_are_the_softmax_of_the_forced_logits():
    logits = jnp.asarray([[[4.0, 3.0, 2.0, 1.0]]])
    replay = M.Replay(jnp.asarray([[[2, 3]]], jnp.uint8), None)
    ids, gates, live = M.route(logits, 2, replay)
    assert ids.tolist() == [[[2, 3]]] and live.tolist() == [[[0, 1]]]
    np.testing.assert_allclose(gates[0, 0], [0.7311, 0.2689], atol=5e-5)


def test_the_gradient_reaches_the_forced_logits_only_and_sums_to_zero():
    replay = M.Replay(jnp.asarray([[[2, 3]]], jnp.uint8), None)
    gradient = jax.grad(lambda x: M.route(x, 2, replay)[1][0, 0, 0])(
        jnp.asarray([[[4.0, 3.0, 2.0, 1.0]]])
    )[0, 0]
    assert gradient[0] == gradient[1] == 0 and gradient[2] != 0
    np.testing.assert_allclose(gradient.sum(), 0, atol=1e-7)


def test_the_live_router_picks_as_a_stable_sort_does():
    rng = np.random.default_rng(0)
    logits = -rng.integers(1, 10, size=(2, 50, 16)).astype(np.float32)  # many ties, all negative
    ids, _, _ = M.route(jnp.asarray(logits), 4, None)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=-1, kind="stable")[..., :4])


def test_a_row_that_was_not_recorded_routes_live_and_never_to_a_sentinel():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 256)), jnp.float32)
    ids = jnp.full((1, 3, 4), 255, jnp.uint8)  # what -1 becomes in uint8: a real expert
    ids = ids.at[0, 0].set(jnp.arange(4, dtype=jnp.uint8))
    recorded = jnp.asarray([[True, False, False]])
    ids, _, live = M.route(logits, 4, M.Replay(ids, recorded))
    assert ids[0, 0].tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(ids[0, 1:], live[0, 1:])


def products(sizes, seed=0, D=24, F=40, extra=0):
    rng = np.random.default_rng(seed)
    rows = sum(sizes) + extra + ROW_PADDING
    x = np.zeros((rows, D), np.float32)
    x[: sum(sizes)] = rng.normal(size=(sum(sizes), D))
    return jnp.asarray(x), jnp.asarray(rng.normal(size=(len(sizes), D, F)), jnp.float32)


SIZES = {
    "uneven": [300, 0, 17, 1, 513, 0, 64],
    "decoding": [0, 3, 0, 1, 0, 9, 0],
    "all in one": [0, 0, 700],
    "none": [0, 0, 0],
}


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("backend", ["blocked", "ragged", "dense"])
@pytest.mark.parametrize("extra", [0, 45])
def test_grouped_matmul_and_its_gradient_rule(case, backend, extra):
    sizes = SIZES[case]
    x, w = products(sizes, extra=extra)
    dy = jnp.asarray(np.random.default_rng(9).normal(size=(x.shape[0], w.shape[2])), jnp.float32)
    got, pull = jax.vjp(
        lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes, jnp.int32), backend=backend), x, w
    )
    dx, dw = pull(dy)
    want, want_dx, want_dw = np.zeros(got.shape), np.zeros(x.shape), np.zeros(w.shape)
    start = 0
    for e, n in enumerate(sizes):
        part = slice(start, start + n)
        want[part] = np.asarray(x[part]) @ np.asarray(w[e])
        want_dx[part] = np.asarray(dy[part]) @ np.asarray(w[e]).T
        want_dw[e] = np.asarray(x[part]).T @ np.asarray(dy[part])
        start += n
    np.testing.assert_allclose(got[:start], want[:start], atol=1e-3)
    np.testing.assert_allclose(got[start:], 0)
    np.testing.assert_allclose(dx[:start], want_dx[:start], atol=1e-3)
    np.testing.assert_allclose(dw, want_dw, atol=2e-3)


@pytest.mark.parametrize("backend", ["blocked", "ragged", "dense"])
def test_a_layer_is_read_out_of_a_stack_and_the_gradient_goes_to_the_layer(backend):
    sizes = jnp.asarray([5, 0, 30], jnp.int32)
    x, w = products(sizes.tolist())
    stack = jnp.concatenate([w + 1, w, w - 1])
    value = lambda w, stack: jnp.sum(  # noqa: E731
        grouped_matmul(x, w, sizes, backend=backend, stack=stack) ** 2
    )
    plain, wanted = jax.value_and_grad(value)(w, None)
    found, gradient = jax.value_and_grad(value)(w, Stack(stack, jnp.int32(3)))
    assert plain == found
    np.testing.assert_array_equal(gradient, wanted)


def experts(E, D, F, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *s: jnp.asarray(rng.normal(size=s) * 0.2, jnp.float32)  # noqa: E731
    return M.Experts(draw(E, D, 2, F), draw(E, F, D), None)


def token_by_token(x, ids, gates, valid, w):
    out = np.zeros(x.shape)
    for b, t in zip(*np.nonzero(valid), strict=True):
        for e, gate in zip(ids[b, t], gates[b, t], strict=True):
            up = np.einsum("d,duf->uf", x[b, t], w.gate_up_EDUF[e])
            hidden = up[0] / (1 + np.exp(-up[0])) * up[1]
            out[b, t] += gate * (hidden @ np.asarray(w.down_EFD[e]))
    return out


def problem(B=8, T=6, D=16, F=8, E=8, C=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(B, T, D)).astype(np.float32)
    ids = np.stack([rng.permutation(E)[:C] for _ in range(B * T)]).reshape(B, T, C)
    gates = rng.uniform(size=(B, T, C)).astype(np.float32)
    valid = rng.uniform(size=(B, T)) > 0.2
    return x, ids.astype(np.int32), gates, valid, experts(E, D, F)


MESHES = ["", "data=8", "expert=8", "data=2,expert=4", "expert=2,tensor=2", "expert=2,context=2",
          "fsdp=2,expert=2,tensor=2"]  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dispatch", ["gather", "ragged_all_to_all"])
@pytest.mark.parametrize("planned", [False, True], ids=["live", "planned"])
def test_dispatch_and_its_gradients_on_every_mesh(mesh, dispatch, planned):
    x, ids, gates, valid, weights = problem()
    run = G.execution(mesh, dispatch=dispatch)
    plan = None
    if planned:
        plans = G.plans(ids[None], valid, 8, run)
        plan = jax.tree.map(lambda leaf: leaf[0], plans)

    def objective(x, gates, weights, run, plan):
        out = M.dispatch(x, jnp.asarray(ids), gates, jnp.asarray(valid), weights, plan, run)
        return jnp.sum(jnp.sin(out) * jnp.arange(out.shape[-1], dtype=jnp.float32)), out

    gradient = jax.jit(jax.grad(objective, argnums=(0, 1, 2), has_aux=True), static_argnums=3)
    arguments = jnp.asarray(x), jnp.asarray(gates), weights
    got, out = gradient(*arguments, run, plan)
    np.testing.assert_allclose(out, token_by_token(x, ids, gates, valid, weights), atol=1e-5)
    wanted, _ = gradient(*arguments, G.execution(grouped_matmul="dense"), None)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert G.relative(np.asarray(a), np.asarray(b)) < 1e-5


@pytest.mark.parametrize("mesh", ["", "expert=8"])
def test_nothing_is_dropped_when_every_token_picks_the_same_experts(mesh):
    x, ids, gates, valid, weights = problem()
    ids = np.broadcast_to(np.asarray([5, 6, 7], np.int32), ids.shape)
    got = M.dispatch(
        *map(jnp.asarray, (x, ids, gates, valid)), weights, None, G.execution(mesh)
    )
    np.testing.assert_allclose(got, token_by_token(x, ids, gates, valid, weights), atol=1e-5)


def test_padding_does_no_expert_work():
    ids = jnp.zeros((1024, 8), jnp.int32) + jnp.arange(8)
    ids = ids.at[1:].set(256)  # what dispatch gives padding
    per_shard = [M.make_plan(ids, first, 32).sizes_E.sum() for first in range(0, 256, 32)]
    assert [int(n) for n in per_shard] == [8, 0, 0, 0, 0, 0, 0, 0]


def test_the_host_plan_is_the_device_plan():
    _, ids, _, valid, _ = problem()
    plans = G.plans(ids[None], valid, 8, G.execution())
    device = M.make_plan(jnp.where(valid[..., None], ids, 8).reshape(-1, 3), 0, 8)
    copies = int(valid.sum()) * 3
    np.testing.assert_array_equal(plans.sizes_E[0, 0], device.sizes_E)
    np.testing.assert_array_equal(plans.order_R[0, 0, :copies], device.order_R[:copies])
    assert plans.order_R.shape[-1] < device.order_R.shape[0]  # exactly as large as needed
