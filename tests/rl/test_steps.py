"""Steps on a small model: one gradient whatever the split, mesh, packing or rematerialisation.

Compiling a gradient takes ten seconds, so each program is made once and serves several tests.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.model.qwen3_5 import abstract_params
from t1jax.rl import steps
from t1jax.rl.advantages import explained_variance
from t1jax.rl.inputs import ActorInputs, CriticInputs, SftInputs, shardings
from t1jax.rl.optimizer import Optimizer, OptimizerConfig, recipe

from . import plain, small

pytestmark = pytest.mark.slow

CLIP = 0.2


def put(run, inputs):
    return jax.device_put(inputs, shardings(inputs, run.mesh))


@functools.cache
def scorer():
    return steps.make_policy_logprobs(small.model(), small.execution())


@functools.cache
def policy():
    return small.params(small.execution())


def policy_on(run, dtype="float32"):
    """Copies of the policy's parameters, where the run wants them."""
    abstract = abstract_params(small.model(), run.mesh, dtype)
    place = lambda x, a: jax.device_put(jnp.copy(x).astype(a.dtype), a.sharding)  # noqa: E731
    return jax.tree.map(place, policy(), abstract)


@functools.cache
def scored(shift=0):
    packed = small.pack("unpacked")
    return scorer()(policy(), packed.batch, packed.routes(shift=shift))


@functools.cache
def old_logprobs(layout):
    """Of an older policy: far enough from this one for the clip to act on both sides."""
    packed, episodes = small.pack(layout), small.unpack("unpacked", scored().logprobs_BT)
    old_BT = 0.3 * packed.numbers["noise"]  # NaN where there is no target
    for b, members in enumerate(small.ROWS[layout][0]):
        logprobs_T = np.concatenate([episodes[member] for member in members])
        old_BT[b, : len(logprobs_T)] += logprobs_T
    return old_BT


def actor_inputs(layout, routes):
    packed = small.pack(layout)
    return ActorInputs(
        packed.batch, routes, old_logprobs(layout), packed.numbers["advantages"]
    )


@functools.cache
def actor(run):
    return steps.make_actor_step(small.model(), run, small.GRADIENT, clip=CLIP)


@functools.cache
def first_learner(run):
    return steps.new_learner(small.model(), run, small.GRADIENT, policy_on(run))


def gradient(step, run, micro_batches):
    learner = jax.tree.map(jnp.copy, first_learner(run))  # the step donates it
    learner, metrics = step(learner, put(run, micro_batches))
    return small.gradient_of(learner), jax.tree.map(float, metrics)


@functools.cache
def actor_gradient(case):
    run, packed = small.execution(), small.pack("unpacked")
    if case == "mesh":
        run = small.execution("data=2,expert=4")
        inputs = [actor_inputs("unpacked", packed.routes(run))]
    elif case == "packed micro-batches with remat":
        run = small.execution(remat="full")
        whole = actor_inputs("packed", small.pack("packed").routes())
        inputs = [small.rows(whole, slice(i, i + 1)) for i in range(4)]
    else:
        inputs = [actor_inputs("unpacked", packed.routes())]
    return gradient(actor(run), run, inputs)


def relative(got, want):
    got, want = (np.concatenate([x.ravel() for x in jax.tree.leaves(t)]) for t in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


# ---- the actor -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["mesh", "packed micro-batches with remat"])
def test_the_ppo_gradient_under_replay_is_the_same(case):
    """On 8 devices with plans, and in 4 packed, rematerialised micro-batches, as plainly on one.

    The last token of an episode was never an input: its route is missing in the plain run and
    forced at random on the mesh.
    """
    (got, metrics), (want, wanted) = actor_gradient(case), actor_gradient("plain")
    assert relative(got, want) < 1e-5
    assert 0.05 < wanted["clip_fraction"] < 0.5 and wanted["tokens"] == 59
    for name, number in wanted.items():
        np.testing.assert_allclose(metrics[name], number, rtol=2e-5, err_msg=name)


def test_the_replayed_routes_are_not_the_live_ones_and_reach_the_router():
    result = scored()
    real = int(small.pack("unpacked").recorded.sum())
    np.testing.assert_array_equal(result.recorded_L, [real] * 4)
    assert (np.asarray(result.replaced_L) > 0.8 * real).all()
    np.testing.assert_array_equal(result.load_LE.sum(axis=1), [2 * sum(small.LENGTHS)] * 4)
    gradients, _ = actor_gradient("plain")
    for layer in gradients["groups"].values():
        assert (np.abs(layer["moe"]["router"]).max(axis=(1, 2)) > 1e-6).all()


def test_routes_shifted_by_one_token_change_the_logprobs():
    mask_BT = small.pack("unpacked").batch.mask_BT
    moved = np.abs(np.asarray(scored(shift=1).logprobs_BT - scored().logprobs_BT))[mask_BT]
    assert np.mean(moved > 1e-5) > 0.9


def test_the_ratio_is_one_at_the_policy_that_scored():
    packed, run = small.pack("unpacked"), small.execution()
    inputs = actor_inputs("unpacked", packed.routes())
    inputs = inputs._replace(old_logprobs_BT=scored().logprobs_BT)
    _, metrics = gradient(actor(run), run, [inputs])
    advantages = packed.numbers["advantages"][packed.batch.mask_BT]
    np.testing.assert_allclose(metrics["policy_loss"], -advantages.mean(), rtol=1e-5)
    assert metrics["clip_fraction"] == 0
    assert metrics["approximate_kl"] < 1e-12


def test_without_old_logprobs_the_ratio_is_exactly_one():
    packed = small.pack("unpacked")
    inputs = actor_inputs("unpacked", None)._replace(old_logprobs_BT=None)
    tokens = jnp.float32(packed.batch.mask_BT.sum())
    loss = lambda x: steps._surrogate(inputs, x, CLIP, tokens)  # noqa: E731
    (_, metrics), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(scored().logprobs_BT)
    assert float(metrics["approximate_kl"]) == 0
    want = np.where(packed.batch.mask_BT, -packed.numbers["advantages"] / tokens, 0)
    np.testing.assert_allclose(slope, want, rtol=1e-6)


# ---- supervised fine-tuning ----------------------------------------------------------------------


def test_the_sft_gradient_is_ppos_at_ratio_one_and_advantage_one_under_the_live_routes():
    packed, run = small.pack("unpacked"), small.execution()
    step = steps.make_sft_step(small.model(), run, small.GRADIENT)
    got, metrics = gradient(step, run, [SftInputs(packed.batch)])
    live = scorer_with_routes()(policy(), packed.batch)
    logprobs_BT, ids_LBTC = live
    routes = packed.routes()
    routes = routes._replace(replay=routes.replay._replace(ids_BTC=ids_LBTC))
    inputs = ActorInputs(
        packed.batch, routes, logprobs_BT, np.ones_like(packed.numbers["advantages"])
    )
    want, _ = gradient(actor(run), run, [inputs])
    assert relative(got, want) < 1e-5
    sampled = np.asarray(logprobs_BT)[packed.batch.mask_BT]
    np.testing.assert_allclose(metrics["loss"], -sampled.mean(), rtol=1e-5)


def scorer_with_routes():
    run = small.execution()

    @jax.jit
    def score(params, batch):
        bound, out = steps._forward(small.model(), run, params, batch, None)
        return bound.head.logprobs(out.hidden_BTD, batch.targets_BT, run), out.live_routes_LBTC

    return score


def test_inputs_are_split_by_rows_and_positions_and_plans_by_shard():
    run = small.execution("data=2,expert=2,context=2")
    packed = small.pack("unpacked")
    inputs = actor_inputs("unpacked", packed.routes(run))
    placed = put(run, inputs)
    part = lambda x: x.addressable_shards[0].data.shape  # noqa: E731
    B, T = packed.batch.tokens_BT.shape
    for leaf in (*jax.tree.leaves(placed.batch), placed.old_logprobs_BT, placed.advantages_BT):
        assert part(leaf) == (B // 4, T // 2)
    layers, _, _, chosen = placed.routes.replay.ids_BTC.shape
    assert part(placed.routes.replay.ids_BTC) == (layers, B // 4, T // 2, chosen)
    assert placed.routes.replay.ids_BTC.dtype == np.uint8  # widened in the router alone
    assert part(placed.routes.plans.order_R)[:2] == (layers, 1)
    recorded = put(run, inputs._replace(routes=packed.routes())).routes.replay.recorded_BT
    assert part(recorded) == (layers, B // 4, T // 2)


# ---- extra terms ---------------------------------------------------------------------------------


def test_kl_and_entropy_add_their_terms_to_the_actors_loss():
    packed = small.pack("unpacked")
    mask_BT, reference_BT = packed.batch.mask_BT, old_logprobs("unpacked") - 0.5
    inputs = actor_inputs("unpacked", None)._replace(reference_logprobs_BT=reference_BT)
    entropy_BT = packed.numbers["returns"]
    tokens = jnp.float32(mask_BT.sum())
    total, metrics = steps._actor_loss(
        inputs, scored().logprobs_BT, entropy_BT, tokens,
        clip=CLIP, kl=0.3, kl_estimator="k2", entropy=0.01,
    )  # fmt: skip
    want_kl = plain.kl(np.asarray(scored().logprobs_BT), reference_BT, mask_BT, "k2")
    np.testing.assert_allclose(metrics["reference_kl"], want_kl, rtol=1e-5)
    np.testing.assert_allclose(metrics["entropy"], entropy_BT[mask_BT].mean(), rtol=1e-5)
    want = metrics["policy_loss"] + 0.3 * metrics["reference_kl"] - 0.01 * metrics["entropy"]
    np.testing.assert_allclose(total, want, rtol=1e-6)
    assert float(metrics["loss"]) == float(total)


def test_entropy_by_blocks_equals_entropy_at_once():
    """600 positions are two blocks of 256 and a rest; outputs and gradients."""
    rng = np.random.default_rng(0)
    hidden_BTD, weight_DV = rng.normal(size=(2, 600, 8)), rng.normal(size=(8, 11))
    targets_BT = rng.integers(0, 11, (2, 600))
    hidden_BTD, weight_DV = (x.astype(np.float32) for x in (hidden_BTD, weight_DV))

    def by_blocks(weight_DV):
        head = lambda x, run: jnp.einsum("BTD,DV->BTV", x, weight_DV)  # noqa: E731
        out = steps._with_entropy(head, hidden_BTD, targets_BT, small.execution())
        return out[0].sum() + 2 * out[1].sum(), out

    def at_once(weight_DV):
        logp_BTV = jax.nn.log_softmax(hidden_BTD @ weight_DV)
        picked_BT = jnp.take_along_axis(logp_BTV, targets_BT[..., None], axis=-1)[..., 0]
        out = picked_BT, -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, axis=-1)
        return out[0].sum() + 2 * out[1].sum(), out

    got, want = (
        jax.jit(jax.value_and_grad(f, has_aux=True))(weight_DV) for f in (by_blocks, at_once)
    )
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5), got, want)


# ---- the critic ----------------------------------------------------------------------------------
# On 8 devices, with bfloat16 parameters and float32 masters.


class Critic:
    """A critic's step, and what it is made of."""

    model, run = small.model("value"), small.execution("fsdp=2,expert=4")
    optimizer = Optimizer(recipe(OptimizerConfig(learning_rate=3e-3)))
    step = staticmethod(steps.make_critic_step(model, run, optimizer, clip=CLIP))
    values = staticmethod(steps.make_critic_values(model, run))

    @classmethod
    def start(cls, policy, mean_reward):
        return steps.critic_params(cls.model, cls.run, policy, jnp.float32(mean_reward))

    @classmethod
    @functools.cache
    def first_learner(cls):
        start = cls.start(policy_on(cls.run, "bfloat16"), 0.0)
        return steps.new_learner(cls.model, cls.run, cls.optimizer, start)

    @classmethod
    def learner(cls):
        return jax.tree.map(jnp.copy, cls.first_learner())

    @classmethod
    def inputs(cls, batch, old_values_BT, returns_BT):
        return put(cls.run, [CriticInputs(batch, old_values_BT, returns_BT)])


def test_warming_up_the_critic_lowers_its_loss_and_leaves_the_policy_bit_identical():
    packed, policy = small.pack("unpacked"), policy_on(Critic.run, "bfloat16")
    bits = lambda tree: jax.tree.map(lambda x: np.asarray(x).tobytes(), tree)  # noqa: E731
    before = bits(policy)
    start = Critic.start(policy, 0.25)
    old_BT = Critic.values(start, packed.batch)
    real = packed.batch.segments_BT > 0
    np.testing.assert_array_equal(np.asarray(old_BT)[real], np.float32(0.25))

    learner, losses = steps.new_learner(Critic.model, Critic.run, Critic.optimizer, start), []
    for _ in range(4):
        inputs = Critic.inputs(packed.batch, old_BT, packed.numbers["returns"])
        learner, metrics = Critic.step(learner, inputs)
        old_BT = Critic.values(learner.params, packed.batch)
        losses.append(float(metrics["loss"]))
    returns = packed.numbers["returns"][packed.batch.mask_BT]
    np.testing.assert_allclose(losses[0], ((returns - 0.25) ** 2).mean(), rtol=1e-5)
    assert losses[3] < losses[2] < losses[1] < losses[0], losses
    assert int(learner.step) == 4
    assert bits(policy) == before


def test_the_critics_explained_variance_rises_above_nine_tenths():
    """Returns are a table by input token, which a critic can learn; the head starts silent."""
    batch = small.pack("unpacked").batch
    table = np.random.default_rng(0).normal(size=Critic.model.config.vocab).astype(np.float32)
    returns_BT = table[batch.tokens_BT]
    returns_BT -= returns_BT[batch.mask_BT].mean()
    learner, explained = Critic.learner(), []
    for _ in range(13):
        values_BT = Critic.values(learner.params, batch)
        explained.append(float(explained_variance(values_BT, returns_BT, batch.mask_BT)))
        learner, _ = Critic.step(learner, Critic.inputs(batch, values_BT, returns_BT))
    np.testing.assert_allclose(explained[0], 0, atol=1e-5)
    assert explained[-1] > 0.9, explained


def test_a_learner_stays_where_its_abstract_form_says():
    abstract = steps.abstract_learner(Critic.model, Critic.run, Critic.optimizer, "bfloat16")
    learner = Critic.learner()
    zeros = np.zeros(small.pack("unpacked").batch.mask_BT.shape, np.float32)
    same = lambda x, a: (x.shape, x.dtype, x.sharding) == (a.shape, a.dtype, a.sharding)  # noqa: E731
    assert all(jax.tree.leaves(jax.tree.map(same, learner, abstract)))
    learner, _ = Critic.step(learner, Critic.inputs(small.pack("unpacked").batch, zeros, zeros + 1))
    assert all(jax.tree.leaves(jax.tree.map(same, learner, abstract)))


def test_a_step_that_is_not_sound_changes_nothing_and_is_counted():
    packed, learner = small.pack("unpacked"), Critic.learner()
    returns = np.nan_to_num(packed.numbers["returns"])
    old_BT = np.zeros_like(returns)
    infinite = np.where(packed.batch.mask_BT, np.inf, returns)
    unsampled = dataclasses.replace(packed.batch, mask_BT=np.zeros_like(packed.batch.mask_BT))
    before = jax.tree.map(np.asarray, learner)
    for unsound in ((packed.batch, old_BT, infinite), (unsampled, old_BT, returns)):
        learner, metrics = Critic.step(learner, Critic.inputs(*unsound))
        assert int(metrics["skipped"]) == 1 and float(metrics["update_norm"]) == 0
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, learner), before)
    learner, metrics = Critic.step(learner, Critic.inputs(packed.batch, old_BT, returns))
    assert int(metrics["skipped"]) == 0 and int(learner.step) == 1


def test_a_step_moves_nothing_between_host_and_device_and_donates_its_learner():
    packed, learner = small.pack("unpacked"), Critic.learner()
    zeros = np.zeros_like(packed.numbers["returns"])
    inputs = Critic.inputs(packed.batch, zeros, zeros + 1)
    with jax.transfer_guard("disallow"):
        _, metrics = Critic.step(learner, inputs)
    assert int(metrics["skipped"]) == 0
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(learner.params["embed"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: steps.make_critic_values(small.model(), small.execution()),
         r"the model has a LMHead; expected a ValueHead"),
        (lambda: steps.make_sft_step(small.model("value"), small.execution(), small.GRADIENT),
         r"the model has a ValueHead; expected a LMHead"),
        (lambda: Critic.step(None, []), r"a step got no micro-batches"),
        (lambda: steps._reference(ActorInputs(None, None, None, None)),
         r"needs ActorInputs\.reference_logprobs_BT"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_work_says_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()
