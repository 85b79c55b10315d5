"""Worker: the tasks of t1jax's training steps, loop and saving."""

import contextlib
import functools
import io
import itertools
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from model_ours import RUN, subject
from model_sizes import POSITIONS, ROWS, document, narrow_document
from workers import Task, serve

from t1jax.checkpoint.train_state import TrainStates
from t1jax.config import parse_config
from t1jax.data.folder import Entry
from t1jax.data.packing import arrange, efficiency, plan
from t1jax.model.config import from_huggingface
from t1jax.model.execution import default_execution
from t1jax.model.moe import Plan, Replay, plan_layout
from t1jax.model.qwen3_5 import Qwen3_5, abstract_params, bind, init_params
from t1jax.pipeline import sft
from t1jax.pipeline.learning import Setup
from t1jax.pipeline.session import session
from t1jax.rl import steps
from t1jax.rl.inputs import ActorInputs, Batch, Routes, SftInputs, shardings
from t1jax.rl.optimizer import Optimizer, OptimizerConfig, recipe
from t1jax.trajectory.io import save_trajectory
from t1jax.trajectory.record import Ending, Finish
from t1jax.trajectory.recorder import Recorder

OPTIMIZER = Optimizer(recipe(OptimizerConfig(learning_rate=1e-6)))
STEPS = 8  # of the loop whose gaps are measured


class Training:
    """A learner of the 221M-parameter model and a batch; each run is one step of it."""

    def __init__(self, step, inputs):
        model, params, _ = subject()
        self.step, self.inputs = step, inputs
        self.learner = steps.new_learner(model, RUN, OPTIMIZER, jax.tree.map(jnp.copy, params))

    def run(self) -> None:
        self.learner, told = self.step(self.learner, [self.inputs])
        jax.block_until_ready((self.learner, told))


def batch() -> Batch:
    """Four rows, every target sampled."""
    tokens_BT = np.asarray(subject()[2], np.int32)
    one_BT = np.ones((ROWS, POSITIONS), np.int32)
    return Batch(
        tokens_BT=tokens_BT, targets_BT=np.roll(tokens_BT, -1, axis=1),
        positions_BT=np.cumsum(one_BT, axis=1, dtype=np.int32) - 1, segments_BT=one_BT,
        mask_BT=one_BT > 0,
    )  # fmt: skip


def put(inputs):
    return jax.device_put(inputs, shardings(inputs, RUN.mesh))


def sft_task() -> Task:
    """Log-softmax, gradient, clip, AdamW."""
    step = steps.make_sft_step(subject()[0], RUN, OPTIMIZER)
    return Task.in_a_row(Training(step, put(SftInputs(batch()))).run)


def recorded_routes() -> Routes:
    """What the live router picks, as a loader hands it over: planned on the host."""
    model, params, tokens_BT = subject()

    @jax.jit
    def live(params, tokens_BT):
        return bind(model, params)(tokens_BT, run=RUN).routes_LBTC

    ids_LBTC = np.asarray(live(params, tokens_BT)).astype(model.config.route_dtype)

    class Rows:
        segments_BT = np.ones(ids_LBTC.shape[1:3], np.int32)

    Rows.ids_LBTC = ids_LBTC
    layout = plan_layout(RUN.mesh, RUN.dispatch)
    return Routes(Replay(ids_LBTC, None), Plan(*plan(Rows, model.config.moe.experts, layout)))


def actor_task(replay: bool) -> Task:
    """PPO's update of the policy, with or without recorded routes."""
    step = steps.make_actor_step(subject()[0], RUN, OPTIMIZER, clip=0.2)
    noise_BT = np.random.default_rng(0).normal(size=(ROWS, POSITIONS)).astype(np.float32)
    inputs = ActorInputs(batch(), recorded_routes() if replay else None, None, noise_BT)
    return Task.in_a_row(Training(step, put(inputs)).run)


# ---- packing, on the host ------------------------------------------------------------------------


def packing(median: int, spread: float, trajectories: int, rows: int) -> float:
    """Share of columns that hold a token: log-normal lengths, cut at rows of 86,016 columns."""
    columns = 86016
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(np.log(median), spread, trajectories))
    whole = np.clip(lengths, 256, columns).astype(int).tolist()
    return efficiency(arrange(whole, tokens=columns, rows=rows, packed=True), whole)


# ---- the loop ------------------------------------------------------------------------------------


def loop_gaps() -> dict[str, float]:
    """The real SFT loop over trajectories on disk: seconds in a step, and from one to the next."""
    model = Qwen3_5(from_huggingface(document(4, 16)))
    run = default_execution(dtype="float32", remat="dots")
    work = Path(tempfile.mkdtemp())
    try:
        config = parse_config(
            {
                "run": str(work / "run"), "model": {"checkpoint": "none", "dtype": "float32"},
                "checkpoints": {"every_steps": 1000, "min_free_mb": 1},
                "sft": {
                    "trajectories": str(work / "t"), "epochs": STEPS, "batch_trajectories": 8,
                    "optimizer": {"learning_rate": 1e-6}, "batch": {"tokens": 1024, "rows": 2},
                },
            },
            "the benchmark",
        )  # fmt: skip
        setup = Setup(config=config, policy=model, critic=Qwen3_5(model.config, "value"), run=run)
        inner, edges = steps.make_sft_step(model, run, OPTIMIZER), []

        def step(learner, inputs):
            begin = time.perf_counter()
            out = jax.block_until_ready(inner(learner, inputs))
            edges.append((begin, time.perf_counter()))
            return out

        sft.load_policy = lambda *_: init_params(model, jax.random.key(0))  # no files of weights
        entries = record(work / "t", model)
        quiet = contextlib.redirect_stderr(io.StringIO())
        with session(setup, "sft", total=STEPS, shown=()) as stage, quiet:
            sft.fine_tune(setup, entries, OPTIMIZER, step, stage)
    finally:
        shutil.rmtree(work)
    later = edges[2:-1]  # neither compiling nor the last step's save
    busy = [end - begin for begin, end in later]
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(later)]
    return {"step": statistics.median(busy), "gap": statistics.median(gaps)}


def record(folder: Path, model: Qwen3_5) -> list[Entry]:
    """Eight trajectories of 250 tokens."""
    moe, random = model.config.moe, np.random.default_rng(0)
    shape = Setup.shape.fget(type("S", (), {"policy": model}))
    entries = []
    for number in range(8):
        recorder = Recorder(shape)
        recorder.append_context(random.integers(0, model.config.vocab, 50))
        sampled = random.integers(0, model.config.vocab, 200)
        recorder.append_sampled(sampled, np.full(200, -9.0), version=0, finish=Finish.stop)
        ids = np.stack(
            [random.permutation(moe.experts)[: moe.chosen] for _ in range(249 * shape.layers)]
        )
        recorder.record_routes(0, ids.reshape(249, shape.layers, -1).astype(np.uint8))
        ending = Ending(task=f"made/{number}", outcome="solved", reward=1.0)
        save_trajectory(recorder.finish(ending), folder / str(number))
        path = str(folder / str(number))
        entries.append(Entry(path=path, task=ending.task, reward=1.0, tokens=(250,)))
    return entries


# ---- saving --------------------------------------------------------------------------------------


def saving() -> dict[str, list[float]]:
    """Seconds until `save` returns, and until all is on disk, of the 221M model's learner."""
    model, params, _ = subject()
    learner = steps.new_learner(model, RUN, OPTIMIZER, jax.tree.map(jnp.copy, params))
    blocked, whole = [], []
    kept = {"keep_last": 1, "keep_best": 0, "min_free_mb": 1}
    with tempfile.TemporaryDirectory() as folder, TrainStates(folder, **kept) as states:
        for step in range(4):
            begin = time.perf_counter()
            states.save(step, {"actor": learner}, {})
            blocked.append(time.perf_counter() - begin)
            states.wait()
            whole.append(time.perf_counter() - begin)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(learner))
    return {"blocked": blocked[1:], "whole": whole[1:], "bytes": size}


# ---- memory --------------------------------------------------------------------------------------


def logprob_bytes(vocab: int, positions: int, gradient: bool) -> int:
    """What the compiler plans for temporary arrays of the log-prob pass, or of its gradient."""
    model = Qwen3_5(from_huggingface(narrow_document(4) | {"vocab_size": vocab}))
    ints = jax.ShapeDtypeStruct((1, positions), jnp.int32)
    flags = jax.ShapeDtypeStruct((1, positions), jnp.bool_)
    inputs = Batch(tokens_BT=ints, targets_BT=ints, positions_BT=ints, segments_BT=ints,
                   mask_BT=flags)  # fmt: skip
    if not gradient:
        program = steps.make_policy_logprobs(model, RUN)
        compiled = program.lower(abstract_params(model), inputs, None).compile()
    else:

        def loss(params, inputs):
            bound = bind(model, params)
            out = bound(inputs.tokens_BT, run=RUN, segments_BT=inputs.segments_BT)
            return bound.head.logprobs(out.hidden_BTD, inputs.targets_BT, RUN).mean()

        compiled = jax.jit(jax.grad(loss)).lower(abstract_params(model), inputs).compile()
    return compiled.memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    serve(
        {
            "sft": sft_task,
            "live": functools.partial(actor_task, False),
            "replay": functools.partial(actor_task, True),
        },
        {
            "packing": packing,
            "loop_gaps": loop_gaps,
            "saving": saving,
            "logprob_bytes": logprob_bytes,
        },
    )
