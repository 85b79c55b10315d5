"""Worker: the tasks of t1jax's model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from model_sizes import (
    CACHED,
    CAPACITY,
    DECODE_STEPS,
    POSITIONS,
    ROWS,
    document,
    narrow_document,
)
from workers import PeakMemory, Task, serve

from t1jax.model.cache import empty_cache
from t1jax.model.config import from_huggingface
from t1jax.model.execution import default_execution
from t1jax.model.grouped_matmul import ROW_PADDING, grouped_matmul
from t1jax.model.moe import Replay, make_plan
from t1jax.model.qwen3_5 import Qwen3_5, abstract_params, bind, forward, init_params

RUN = default_execution(dtype="float32", remat="dots")
jit = functools.partial(jax.jit, compiler_options=RUN.compiler_options)


@functools.cache
def subject():
    """The model, its parameters and a batch of tokens."""
    model = Qwen3_5(from_huggingface(document()))
    tokens_BT = jax.random.randint(jax.random.key(1), (ROWS, POSITIONS), 0, model.config.vocab)
    return model, jax.block_until_ready(init_params(model, jax.random.key(0))), tokens_BT


def parameters() -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(subject()[1]))


@functools.cache
def given(variant: str):
    """What the forward pass is given besides tokens: nothing, its own routes, or also a plan."""
    if variant == "live":
        return {}
    model, params, tokens_BT = subject()
    routes_LBTC = jax.jit(lambda p, t: forward(model, p, t, run=RUN).routes_LBTC)(params, tokens_BT)
    replay = {"replay": Replay(jax.block_until_ready(routes_LBTC), None)}
    if variant == "replay":
        return replay
    L, C = routes_LBTC.shape[0], routes_LBTC.shape[-1]
    ids_LPC = routes_LBTC.astype(jnp.int32).reshape(L, -1, C)
    plan = functools.partial(make_plan, first=0, experts=model.config.moe.experts)
    plans = jax.tree.map(lambda leaf: leaf[:, None], jax.jit(jax.vmap(plan))(ids_LPC))
    return replay | {"plans": jax.block_until_ready(plans)}


def forward_task(variant: str = "live", with_routes: bool = False) -> Task:
    """Logits of the batch and nothing else, or also the routes used."""
    model, params, tokens_BT = subject()

    @jit
    def logits(params, tokens_BT, given):
        output = forward(model, params, tokens_BT, run=RUN, **given)
        logits_BTV = bind(model, params).head(output.hidden_BTD, RUN)
        return (logits_BTV, output.routes_LBTC) if with_routes else logits_BTV

    arguments = params, tokens_BT, given(variant)
    return Task.in_a_row(lambda: jax.block_until_ready(logits(*arguments)))


def loss_and_gradients(model):
    """Mean log-prob of the next token, and its gradient by every parameter."""

    def loss(params, tokens_BT, given):
        bound = bind(model, params)
        hidden_BTD = bound(tokens_BT, run=RUN, **given).hidden_BTD
        return bound.head.logprobs(hidden_BTD, jnp.roll(tokens_BT, -1, axis=1), RUN).mean()

    return jit(jax.value_and_grad(loss))


def train_task(variant: str = "live") -> Task:
    model, params, tokens_BT = subject()
    step, arguments = loss_and_gradients(model), (params, tokens_BT, given(variant))
    return Task.in_a_row(lambda: jax.block_until_ready(step(*arguments)))


def train_memory() -> dict[str, int]:
    """Peak growth over three steps after weights and compilation; see model.py."""
    model, params, tokens_BT = subject()
    compiled = loss_and_gradients(model).lower(params, tokens_BT, {}).compile()
    peak = PeakMemory()
    for _ in range(3):
        jax.block_until_ready(compiled(params, tokens_BT, {}))
    planned = compiled.memory_analysis()
    return {
        "growth": peak.growth(),
        "planned": planned.temp_size_in_bytes + planned.output_size_in_bytes,
    }


class Decode:
    """Greedy decoding of `rows` rows, whose cache starts with CACHED tokens."""

    def __init__(self, rows: int):
        model, self.params, tokens_BT = subject()
        self.prompts = jnp.tile(tokens_BT[:, :CACHED], (-(-rows // ROWS), 1))[:rows]

        def read(params, tokens_BT, cache):
            output = forward(model, params, tokens_BT, run=RUN, cache=cache)
            logits_BTV = bind(model, params).head(output.hidden_BTD[:, -1:], RUN)
            return logits_BTV.argmax(axis=-1).astype(jnp.int32), output.cache

        self.read = jit(read, donate_argnums=2)
        self.empty = functools.partial(empty_cache, model.config, rows, CAPACITY, "float32")
        self.length = CAPACITY

    def make_room(self) -> None:
        if self.length + DECODE_STEPS > CAPACITY:
            self.token, self.cache = self.read(self.params, self.prompts, self.empty())
            self.length = CACHED
        jax.block_until_ready((self.token, self.cache))

    def run(self) -> None:
        for _ in range(DECODE_STEPS):
            self.token, self.cache = self.read(self.params, self.token, self.cache)
        self.length += DECODE_STEPS
        jax.block_until_ready(self.token)


def decode_task(rows: int) -> Task:
    decode = Decode(rows)
    return Task(run=decode.run, before=decode.make_room)


def decode_bytes(rows: int) -> int:
    """Weights that a decoding step must read: all but the embedding and experts not chosen."""
    model, params, tokens_BT = subject()
    tokens_B1 = jnp.tile(tokens_BT[:, :1], (-(-rows // ROWS), 1))[:rows]
    tokens_B1 = (tokens_B1 + jnp.arange(rows)[:, None]) % model.config.vocab
    ids_LBTC = jax.jit(lambda p, t: forward(model, p, t, run=RUN).routes_LBTC)(params, tokens_B1)
    chosen = sum(len(np.unique(ids)) for ids in np.asarray(ids_LBTC))
    experts = [
        leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params["groups"])
        if path[-1].key in ("gate_up", "down")
    ]
    held = model.config.layers * model.config.moe.experts
    dense = parameters() - params["embed"].size - sum(leaf.size for leaf in experts)
    return 4 * (dense + sum(leaf.size for leaf in experts) * chosen // held)


def read_task() -> Task:
    """Reads every expert weight once and adds it up: the rate at which weights can be read."""
    experts = [
        layer["moe"][name] for layer in subject()[1]["groups"].values()
        for name in ("gate_up", "down")
    ]
    total = jax.jit(lambda leaves: sum(leaf.sum() for leaf in leaves))
    return Task(run=lambda: total(experts).block_until_ready(), repeats=3)


def read_bytes() -> int:
    """What `read_task` reads in one run."""
    layers = subject()[1]["groups"].values()
    return sum(layer["moe"][name].nbytes for layer in layers for name in ("gate_up", "down"))


def plain_task(rows: int, inner: int, outer: int) -> Task:
    """One dense float32 product: the machine's plain rate."""
    shapes = (rows, inner), (inner, outer)
    x, w = (jax.random.normal(jax.random.key(0), shape) for shape in shapes)
    product = jax.jit(jnp.dot)
    return Task(run=lambda: product(x, w).block_until_ready(), repeats=5)


def grouped_task(experts: int, inner: int, outer: int, gradient: bool) -> Task:
    """The routed copies of the batch times their experts' matrices; `experts` = 0: one matrix."""
    copies = ROWS * POSITIONS * document()["num_experts_per_tok"]
    even = np.full(max(experts, 1), 1 / max(experts, 1))
    sizes_E = jnp.asarray(np.random.default_rng(0).multinomial(copies, even), "int32")
    shape = (experts, inner, outer) if experts else (inner, outer)
    w = jax.random.normal(jax.random.key(1), shape)
    padding = ROW_PADDING if experts else 0
    x_RD = jnp.pad(jax.random.normal(jax.random.key(0), (copies, inner)), ((0, padding), (0, 0)))
    dy_RF = jnp.ones((copies + padding, outer))

    def product(x_RD, w):
        return grouped_matmul(x_RD, w, sizes_E, backend="blocked") if experts else x_RD @ w

    def gradients(x_RD, w):
        y_RF, pull = jax.vjp(product, x_RD, w)
        return y_RF, pull(dy_RF)

    run = jit(gradients if gradient else product)
    return Task(run=lambda: jax.block_until_ready(run(x_RD, w)), repeats=3)


def compile_task(layers: int, gradient: bool) -> Task:
    """Tracing, lowering and compiling a narrow model of this depth."""
    model = Qwen3_5(from_huggingface(narrow_document(layers)))
    params = abstract_params(model)
    tokens_BT = jax.ShapeDtypeStruct((2, 128), jnp.int32)

    def logits(params, tokens_BT, given):
        hidden_BTD = forward(model, params, tokens_BT, run=RUN, **given).hidden_BTD
        return bind(model, params).head(hidden_BTD, RUN)

    def run():
        function = loss_and_gradients(model) if gradient else jit(logits)
        function.lower(params, tokens_BT, {}).compile()

    return Task(run=run, before=jax.clear_caches, warm_up=1)



if __name__ == "__main__":
    serve(
        {
            "forward": forward_task, "train": train_task, "decode": decode_task,
            "plain": plain_task, "read": read_task, "grouped": grouped_task,
            "compile": compile_task,
        },
        {
            "parameters": parameters, "train_memory": train_memory,
            "decode_bytes": decode_bytes, "read_bytes": read_bytes,
        },
    )
