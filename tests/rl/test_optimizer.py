"""The optimizer against AdamW written out in float64, and what narrow parameters and moments do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t1jax.model.qwen3_5 import abstract_params, declarations
from t1jax.model.sharding import make_mesh
from t1jax.rl.optimizer import NOT_DECAYED, Optimizer, OptimizerConfig, decayed, recipe, schedule

from . import small


def adamw(config, weights, gradients, rate):
    """AdamW in float64, one tensor at a time; returns the weights after each gradient."""
    m = {k: np.zeros_like(w) for k, w in weights.items()}
    v = {k: np.zeros_like(w) for k, w in weights.items()}
    seen = []
    for t, gradient in enumerate(gradients, start=1):
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        scale = min(1.0, config.max_gradient_norm / norm)
        for k, g in gradient.items():
            m[k] = config.b1 * m[k] + (1 - config.b1) * g * scale
            v[k] = config.b2 * v[k] + (1 - config.b2) * (g * scale) ** 2
            step = m[k] / (1 - config.b1**t) / (
                np.sqrt(v[k] / (1 - config.b2**t)) + config.epsilon
            )
            decay = 0.0 if k in NOT_DECAYED else config.weight_decay
            weights = weights | {k: weights[k] - rate(t - 1) * (step + decay * weights[k])}
        seen.append(weights)
    return seen


def tensors(seed, size=1.0):
    rng = np.random.default_rng(seed)
    return {"embed": rng.normal(0, size, (3, 4)), "scale": rng.normal(0, size, 4)}


def run(config, dtype, gradients):
    optimizer = Optimizer(recipe(config))
    params = {k: jnp.asarray(w, dtype) for k, w in tensors(0).items()}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        gradient = {k: jnp.asarray(g, jnp.float32) for k, g in gradient.items()}
        params, state, norm = update(gradient, state, params)
    return params, state, norm


def test_float32_follows_adamw_with_clip_decay_and_schedule():
    config = OptimizerConfig(
        learning_rate=1e-2, schedule="cosine", final_learning_rate=1e-3, steps=8, warmup_steps=2
    )
    gradients = [tensors(i + 1, size=0.1 if i % 2 else 5.0) for i in range(6)]
    params, state, _ = run(config, "float32", gradients)

    def rate(step):  # written out: a third, two thirds, then a cosine over the other six
        if step < 2:
            return 1e-2 * (step + 1) / 3
        return 1e-3 + 9e-3 * (1 + np.cos(np.pi * (step - 2) / 6)) / 2

    want = adamw(config, tensors(0), gradients, rate)[-1]
    assert jax.tree.leaves(state.masters) == []
    for k, w in want.items():
        np.testing.assert_allclose(params[k], w, rtol=1e-5, atol=1e-6)


def test_bfloat16_parameters_are_their_float32_masters_rounded():
    """Updates of 1e-5 are a hundredth of a bfloat16's rounding, and still add up."""
    config = OptimizerConfig(learning_rate=1e-5, weight_decay=0.1)
    gradients = [tensors(1)] * 300
    params, state, norm = run(config, "bfloat16", gradients)
    start = {k: np.asarray(jnp.asarray(w, jnp.bfloat16), np.float64) for k, w in tensors(0).items()}
    want = adamw(config, start, gradients, lambda step: 1e-5)
    assert norm < 1e-4
    for k in params:
        np.testing.assert_allclose(state.masters[k], want[-1][k], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(params[k], state.masters[k].astype(jnp.bfloat16))
        assert np.abs(want[-1][k] - start[k]).min() > 2e-3


def test_bfloat16_moments_stay_close_and_are_half_as_large():
    gradients = [tensors(i) for i in range(1, 41)]
    full = OptimizerConfig(learning_rate=1e-3)
    narrow = OptimizerConfig(learning_rate=1e-3, moments_dtype="bfloat16")
    params, state, _ = run(narrow, "float32", gradients)
    want = adamw(full, tensors(0), gradients, lambda step: 1e-3)[-1]
    moments = [x for x in jax.tree.leaves(state.inner) if x.ndim > 0]
    assert {x.dtype for x in moments} == {jnp.dtype("bfloat16")} and len(moments) == 4
    for k, w in want.items():
        moved = np.abs(w - tensors(0)[k]).max()
        # 0.4% with float32 inside a step, 1.3% without
        assert np.abs(params[k] - w).max() < 0.008 * moved


def test_moments_decay_when_gradients_vanish():
    gradients = [tensors(1)] + [{k: 0 * g for k, g in tensors(1).items()}] * 200
    for dtype in ("float32", "bfloat16"):
        config = OptimizerConfig(learning_rate=1e-3, moments_dtype=dtype, max_gradient_norm=1e9)
        _, state, _ = run(config, "float32", gradients)
        second = state.inner[1].nu["embed"].astype(jnp.float32)
        np.testing.assert_allclose(second, 0.02 * 0.98**200 * tensors(1)["embed"] ** 2, rtol=0.3)


def test_the_decay_mask_of_the_model_spares_norms_biases_and_rates():
    names = {"/".join(p) for p in declarations(small.model())}
    names |= {"/".join(p) for p in declarations(small.model("value"))}
    flat = {}
    for head in ("lm", "value"):
        tree = decayed(abstract_params(small.model(head)))
        flat |= {
            "/".join(e.key for e in path): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
    assert set(flat) == names
    spared = {name.removeprefix("groups/") for name, decays in flat.items() if not decays}
    assert spared == {
        "final_norm/scale", "head/bias", "layer_0/mixer/log_rate", "layer_0/mixer/decay_bias",
        "layer_0/mixer/scale", "layer_0/mixer_norm/scale", "layer_0/moe_norm/scale",
        "layer_1/mixer/k_norm/scale", "layer_1/mixer/q_norm/scale", "layer_1/mixer_norm/scale",
        "layer_1/moe_norm/scale",
    }  # fmt: skip


def test_the_recipes_sft_schedule():
    rate = schedule(OptimizerConfig(
        learning_rate=3e-6, schedule="cosine", final_learning_rate=3e-7, steps=84
    ))  # fmt: skip
    np.testing.assert_allclose([rate(s) for s in (0, 42, 84)], [3e-6, 1.65e-6, 3e-7], rtol=1e-5)


def test_state_lies_where_its_parameters_lie():
    mesh = make_mesh("fsdp=2,expert=4")
    params = abstract_params(small.model(), mesh, "bfloat16")
    optimizer = Optimizer(recipe(OptimizerConfig(learning_rate=1e-6)))
    state = optimizer.abstract(params)
    adam = state.inner[1]
    for tree in (state.masters, adam.mu, adam.nu):
        assert tree["embed"].dtype == jnp.float32
        assert tree["embed"].sharding == params["embed"].sharding
        down = lambda tree: tree["groups"]["layer_0"]["moe"]["down"].sharding  # noqa: E731
        assert down(tree) == down(params) and "expert" in down(tree).spec
    assert adam.count.sharding.is_fully_replicated
    assert state.masters["groups"]["layer_0"]["mixer"]["log_rate"] is None  # float32 itself


def test_any_optax_transformation_will_do():
    optimizer = Optimizer(optax.sgd(0.5))
    params = {"embed": jnp.ones(2, jnp.bfloat16)}
    params, _, norm = optimizer.update({"embed": jnp.ones(2)}, optimizer.init(params), params)
    np.testing.assert_array_equal(params["embed"].astype(jnp.float32), [0.5, 0.5])
    np.testing.assert_allclose(norm, 0.5 * np.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": -1.0}, r"optimizer\.learning_rate=-1\.0; expected 0 or more"),
        ({"schedule": "linear"}, r"optimizer\.schedule='linear'; expected one of"),
        ({"schedule": "cosine"}, r"optimizer\.steps=0; expected more than warmup_steps=0"),
        ({"schedule": "cosine", "steps": 9, "final_learning_rate": 1.0},
         r"final_learning_rate=1\.0; expected within 0\.\.learning_rate=1e-06"),
        ({"b2": 1.0}, r"optimizer\.b2=1\.0"),
        ({"max_gradient_norm": 0.0}, r"max_gradient_norm=0\.0; expected positive; \.inf: no clip"),
        ({"moments_dtype": "int8"}, r"moments_dtype='int8'; expected float32 or bfloat16"),
        ({"moments_dtype": "bfloat16", "b2": 0.999}, r"b2=0\.999: in bfloat16 .* never decays"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_by_field(changes, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**{"learning_rate": 1e-6, **changes})
