"""The device's side of learning: jitted steps, state and batch in, state and metrics out.

    score = make_policy_logprobs(model, run)             # (params, batch, routes) -> Scored
    values = make_critic_values(critic, run)             # (params, batch) -> [B, T]
    step = make_actor_step(model, run, optimizer, clip=0.2)
    learner, metrics = step(learner, [ActorInputs(batch, routes, old_logprobs, advantages), ...])

A step takes the whole batch as a list of micro-batches. Losses are means over all of the list's
sampled tokens, whatever their split: equal gradients to rounding. Shapes may differ within a list;
each shape compiles once. `make_*` closes over what is static; the learner is donated. Nothing here
waits for the device or moves an array to it: inputs arrive placed (`inputs.shardings`).

Not here: packing, loops, files; what to do when a step was skipped.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from t1jax.model.execution import Execution
from t1jax.model.heads import LOGPROB_BLOCK, LMHead, ValueHead
from t1jax.model.qwen3_5 import Output, Params, Qwen3_5, abstract_params, bind
from t1jax.rl import mismatch, objectives
from t1jax.rl.inputs import ActorInputs, Batch, CriticInputs, Routes, SftInputs
from t1jax.rl.optimizer import Optimizer, OptimizerState

Metrics = dict[str, jax.Array]
Inputs = TypeVar("Inputs", bound=SftInputs | CriticInputs | ActorInputs)


class Scored(NamedTuple):
    """Log-probs of the targets, and counts that add up over micro-batches."""

    logprobs_BT: jax.Array  # float32, also of targets that the mask leaves out
    replaced_L: jax.Array  # int32: (token, layer) rows where replay overruled the live router
    recorded_L: jax.Array  # int32: rows in all that were replayed
    load_LE: jax.Array  # int32: tokens of each expert


class Learner(NamedTuple):
    """What training a model carries from step to step. It owns its arrays: steps donate them."""

    params: Params
    state: OptimizerState
    step: jax.Array  # int32: updates made, skipped ones not counted


# ---- learners ------------------------------------------------------------------------------------


def abstract_learner(
    model: Qwen3_5, run: Execution, optimizer: Optimizer, dtype: str = "float32"
) -> Learner:
    """Shapes, dtypes and shardings of a learner: what a checkpoint restores into."""
    params = abstract_params(model, run.mesh, dtype)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=_whole(run))
    return Learner(params, optimizer.abstract(params), step)  # type: ignore[arg-type]


def new_learner(model: Qwen3_5, run: Execution, optimizer: Optimizer, params: Params) -> Learner:
    """A learner that takes over `params` as they are placed, before its first step."""
    dtype = str(params["embed"].dtype)
    shardings = _shardings(abstract_learner(model, run, optimizer, dtype))
    build = lambda params: (optimizer.init(params), jnp.zeros((), jnp.int32))  # noqa: E731
    state, step = jax.jit(build, out_shardings=(shardings.state, shardings.step))(params)
    return Learner(jax.device_put(params, shardings.params), state, step)


def critic_params(
    critic: Qwen3_5, run: Execution, policy: Params, mean_reward: jax.Array
) -> Params:
    """A critic's first parameters: copies of the policy's body, and a head that says the mean.

    Copies, because a learner donates its arrays and the policy must outlive the critic's steps.
    The head's weight is 0 and its bias the mean reward of the first batch.
    """
    dtype = policy["embed"].dtype
    abstract = abstract_params(critic, run.mesh, str(dtype))

    def build(body: Params, mean_reward: jax.Array) -> Params:
        weight = jnp.zeros(abstract["head"]["weight"].shape, dtype)
        head = {"weight": weight, "bias": mean_reward.astype(dtype)}
        return jax.tree.map(jnp.copy, body) | {"head": head}

    body = {name: leaf for name, leaf in policy.items() if name != "head"}
    return jax.jit(build, out_shardings=_shardings(abstract))(body, mean_reward)


def _whole(run: Execution) -> NamedSharding:
    return NamedSharding(run.mesh, PartitionSpec())


def _shardings(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


# ---- passes without a gradient -------------------------------------------------------------------


def make_policy_logprobs(
    model: Qwen3_5, run: Execution
) -> Callable[[Params, Batch, Routes | None], Scored]:
    """The pass that gives the PPO ratio its denominator: log-probs of targets under routes."""
    _expect_head(model, LMHead)

    @functools.partial(jax.jit, compiler_options=run.compiler_options)
    def policy_logprobs(params: Params, batch: Batch, routes: Routes | None) -> Scored:
        bound, out = _forward(model, run, params, batch, routes)
        valid_BT = batch.segments_BT > 0
        replayed: jax.Array = jnp.zeros_like(valid_BT)
        if routes is not None:
            replayed = valid_BT & ~_last_columns(batch.segments_BT)
            if routes.replay.recorded_BT is not None:
                replayed = replayed & routes.replay.recorded_BT
        return Scored(
            bound.head.logprobs(out.hidden_BTD, batch.targets_BT, run),
            *mismatch.replaced_rows(out.routes_LBTC, out.live_routes_LBTC, replayed),
            mismatch.expert_load(out.routes_LBTC, valid_BT, model.config.moe.experts),
        )

    return policy_logprobs


def _last_columns(segments_BT: jax.Array) -> jax.Array:
    """Each episode's last token: it was no input, so its route is made up where all are forced."""
    after_BT = jnp.pad(segments_BT, ((0, 0), (0, 1)))[:, 1:]
    return segments_BT != after_BT


def make_critic_values(critic: Qwen3_5, run: Execution) -> Callable[[Params, Batch], jax.Array]:
    """Values [B, T] of the state before each target, float32. The critic routes freely."""
    _expect_head(critic, ValueHead)

    @functools.partial(jax.jit, compiler_options=run.compiler_options)
    def critic_values(params: Params, batch: Batch) -> jax.Array:
        bound, out = _forward(critic, run, params, batch, None)
        return bound.head(out.hidden_BTD, run)

    return critic_values


def _forward(
    model: Qwen3_5, run: Execution, params: Params, batch: Batch, routes: Routes | None
) -> tuple[Any, Output]:
    bound = bind(model, params)
    replay, plans = (None, None) if routes is None else routes
    out = bound(
        batch.tokens_BT, run=run, segments_BT=batch.segments_BT,
        positions_BT=batch.positions_BT, replay=replay, plans=plans,
    )  # fmt: skip
    return bound, out


def _expect_head(model: Qwen3_5, kind: type) -> None:
    if not isinstance(model.head, kind):
        raise ValueError(
            f"the model has a {type(model.head).__name__}; expected a {kind.__name__}: the policy "
            'is Qwen3_5(config, "lm"), the critic Qwen3_5(config, "value")'
        )


# ---- steps ---------------------------------------------------------------------------------------

Loss = Callable[[Params, Inputs, jax.Array], tuple[jax.Array, Metrics]]
Step = Callable[[Learner, Sequence[Inputs]], tuple[Learner, Metrics]]


def make_sft_step(model: Qwen3_5, run: Execution, optimizer: Optimizer) -> Step[SftInputs]:
    """Supervised fine-tuning on the sampled tokens."""
    _expect_head(model, LMHead)

    def loss(params: Params, inputs: SftInputs, tokens: jax.Array) -> tuple[jax.Array, Metrics]:
        bound, out = _forward(model, run, params, inputs.batch, None)
        logprobs_BT = bound.head.logprobs(out.hidden_BTD, inputs.batch.targets_BT, run)
        nll = objectives.sft_loss(logprobs_BT, inputs.batch.mask_BT, tokens)
        return nll, {"loss": nll}

    return _make_step(model, run, optimizer, loss)


def make_critic_step(
    critic: Qwen3_5, run: Execution, optimizer: Optimizer, *, clip: float
) -> Step[CriticInputs]:
    """One update of the critic towards the returns."""
    _expect_head(critic, ValueHead)

    def loss(params: Params, inputs: CriticInputs, tokens: jax.Array) -> tuple[jax.Array, Metrics]:
        batch = inputs.batch
        bound, out = _forward(critic, run, params, batch, None)
        error = objectives.clipped_value_loss(
            bound.head(out.hidden_BTD, run), inputs.old_values_BT, inputs.returns_BT,
            batch.mask_BT, clip, denominator=tokens,
        )  # fmt: skip
        return error, {"loss": error}

    return _make_step(critic, run, optimizer, loss)


def make_actor_step(
    model: Qwen3_5,
    run: Execution,
    optimizer: Optimizer,
    *,
    clip: float,
    kl: float = 0.0,
    kl_estimator: str = "k2",
    entropy: float = 0.0,
) -> Step[ActorInputs]:
    """One PPO update of the policy, under the routes that the inputs carry.

    Args:
      model: the policy.
      run: mesh, numerics, rematerialisation.
      optimizer: see `optimizer`.
      clip: of the ratio.
      kl: coefficient of KL(policy || reference) in the loss; the inputs then need
        `reference_logprobs_BT`.
      kl_estimator: see `objectives.kl_divergence`.
      entropy: coefficient of the entropy bonus.
    """
    _expect_head(model, LMHead)

    weigh = functools.partial(
        _actor_loss, clip=clip, kl=kl, kl_estimator=kl_estimator, entropy=entropy
    )

    def loss(params: Params, inputs: ActorInputs, tokens: jax.Array) -> tuple[jax.Array, Metrics]:
        bound, out = _forward(model, run, params, inputs.batch, inputs.routes)
        targets_BT = inputs.batch.targets_BT
        if entropy == 0.0:
            logprobs_BT = bound.head.logprobs(out.hidden_BTD, targets_BT, run)
            return weigh(inputs, logprobs_BT, None, tokens)
        logprobs_BT, entropy_BT = _with_entropy(bound.head, out.hidden_BTD, targets_BT, run)
        return weigh(inputs, logprobs_BT, entropy_BT, tokens)

    return _make_step(model, run, optimizer, loss)


def _actor_loss(
    inputs: ActorInputs,
    logprobs_BT: jax.Array,
    entropy_BT: jax.Array | None,
    tokens: jax.Array,
    *,
    clip: float,
    kl: float,
    kl_estimator: str,
    entropy: float,
) -> tuple[jax.Array, Metrics]:
    """policy loss + kl * KL(policy || reference) - entropy * H; terms of factor 0 are left out."""
    mask_BT = inputs.batch.mask_BT
    total, metrics = _surrogate(inputs, logprobs_BT, clip, tokens)
    if kl != 0.0:
        metrics["reference_kl"] = objectives.kl_divergence(
            logprobs_BT, _reference(inputs), mask_BT, kl_estimator, denominator=tokens
        )
        total += kl * metrics["reference_kl"]
    if entropy_BT is not None:
        metrics["entropy"] = objectives.token_mean(entropy_BT, mask_BT, tokens)
        total -= entropy * metrics["entropy"]
    return total, metrics | {"loss": total}


def _surrogate(
    inputs: ActorInputs, logprobs_BT: jax.Array, clip: float, tokens: jax.Array
) -> tuple[jax.Array, Metrics]:
    mask_BT, advantages_BT = inputs.batch.mask_BT, inputs.advantages_BT
    fixed_BT = jax.lax.stop_gradient(logprobs_BT)
    old_BT = fixed_BT if inputs.old_logprobs_BT is None else inputs.old_logprobs_BT
    share = functools.partial(objectives.clip_fraction, clip=clip, denominator=tokens)
    policy_loss = objectives.clipped_policy_loss(
        logprobs_BT, old_BT, advantages_BT, mask_BT, clip,
        weights=inputs.weights_BT, denominator=tokens,
    )  # fmt: skip
    return policy_loss, {
        "policy_loss": policy_loss,
        "clip_fraction": share(fixed_BT, old_BT, advantages_BT, mask_BT),
        # KL(old || new) from the old policy's tokens, by the k3 estimator
        "approximate_kl": objectives.kl_divergence(
            old_BT, fixed_BT, mask_BT, "k3", denominator=tokens
        ),
    }


def _reference(inputs: ActorInputs) -> jax.Array:
    if inputs.reference_logprobs_BT is None:
        raise ValueError(
            "a KL coefficient other than 0 needs ActorInputs.reference_logprobs_BT; it is None"
        )
    return inputs.reference_logprobs_BT


def _with_entropy(
    head: Any, hidden_BTD: jax.Array, targets_BT: jax.Array, run: Execution
) -> tuple[jax.Array, jax.Array]:
    """Log-probs of targets and the entropy of each distribution, a block of positions at a time."""

    @jax.checkpoint
    def block(hidden_BTD: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BTV = head(hidden_BTD, run).astype(jnp.float32)
        picked_BT1 = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)
        logprobs_BT = picked_BT1[..., 0] - jax.nn.logsumexp(logits_BTV, axis=-1)
        return logprobs_BT, objectives.entropy(logits_BTV)

    B, T, _ = hidden_BTD.shape
    size = min(LOGPROB_BLOCK, T)
    if run.mesh.shape["context"] > 1 or size == T:
        return block(hidden_BTD, targets_BT)
    cut = lambda x: jnp.moveaxis(  # noqa: E731
        jnp.pad(x, [(0, 0), (0, -T % size)] + [(0, 0)] * (x.ndim - 2)).reshape(
            B, -1, size, *x.shape[2:]
        ), 1, 0,
    )  # fmt: skip
    both = jax.lax.map(lambda x: block(*x), (cut(hidden_BTD), cut(targets_BT)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(B, -1)[:, :T], both)


def _make_step(
    model: Qwen3_5, run: Execution, optimizer: Optimizer, loss: Loss[Inputs]
) -> Step[Inputs]:
    """Gradients summed over micro-batches in float32, then one update.

    A step whose loss or gradient is not finite, or which has no sampled token, changes nothing:
    metrics["skipped"] is 1 then.
    """
    gradient_shardings = _shardings(abstract_params(model, run.mesh))

    @functools.partial(jax.jit, out_shardings=gradient_shardings)
    def zeros() -> Params:
        return jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, jnp.float32), abstract_params(model)
        )

    @functools.partial(
        jax.jit,
        donate_argnums=0,
        out_shardings=(gradient_shardings, _whole(run)),
        compiler_options=run.compiler_options,
    )
    def add_gradient(
        total: Params, params: Params, inputs: Inputs, tokens: jax.Array
    ) -> tuple[Params, Metrics]:
        (_, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(params, inputs, tokens)
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, gradients), metrics

    def apply(
        learner: Learner, gradients: Params, metrics: Metrics, tokens: jax.Array
    ) -> tuple[Learner, Metrics]:
        gradient_norm = optax.tree.norm(gradients)
        sound = jnp.isfinite(gradient_norm) & jnp.isfinite(metrics["loss"]) & (tokens > 0)
        params, state, update_norm = optimizer.update(gradients, learner.state, learner.params)
        new = Learner(params, state, learner.step + 1)
        learner = jax.tree.map(lambda new, old: jnp.where(sound, new, old), new, learner)
        return learner, metrics | {
            "gradient_norm": gradient_norm,
            "update_norm": jnp.where(sound, update_norm, 0.0),
            "tokens": tokens,
            "skipped": 1 - sound.astype(jnp.int32),
        }

    @functools.cache
    def jitted_apply(dtype: str) -> Callable[..., tuple[Learner, Metrics]]:
        # Left to itself the partitioner may spell a placement otherwise, and the next step would
        # be compiled again.
        with jax.transfer_guard("allow"):  # optax makes scalars to learn its state's structure
            placed = _shardings(abstract_learner(model, run, optimizer, dtype))
        return jax.jit(apply, donate_argnums=0, out_shardings=(placed, _whole(run)))

    def step(learner: Learner, micro_batches: Sequence[Inputs]) -> tuple[Learner, Metrics]:
        if not micro_batches:
            raise ValueError("a step got no micro-batches; expected one or more")
        tokens = functools.reduce(
            _add, (_count_tokens(inputs.batch.mask_BT) for inputs in micro_batches)
        )
        gradients, parts = zeros(), []
        for inputs in micro_batches:
            gradients, metrics = add_gradient(gradients, learner.params, inputs, tokens)
            parts.append(metrics)
        update = jitted_apply(str(learner.params["embed"].dtype))
        return update(learner, gradients, functools.reduce(_add, parts), tokens)

    return step


_count_tokens = jax.jit(objectives.token_count)


@jax.jit
def _add(one: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, one, other)
