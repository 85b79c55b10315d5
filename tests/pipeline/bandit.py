"""A token task that needs no sandbox: the policy reads two tokens and samples two.

The reward is the share of sampled tokens that the first token asks for. Episodes are sampled by a
jitted forward pass of the weights that were published, routes included, and depend on seed, step
and version alone.
"""

import asyncio
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from t1jax.checkpoint.convert import FORMAT
from t1jax.config import Config, parse_config
from t1jax.model.config import from_huggingface
from t1jax.model.qwen3_5 import Qwen3_5, bind, init_params
from t1jax.pipeline.collect import Rollout
from t1jax.pipeline.learning import Setup
from t1jax.trajectory.record import Ending, Finish
from t1jax.trajectory.recorder import Recorder

FIXTURES = Path(__file__).parents[1] / "fixtures"
VOCAB, PROMPTS, SAMPLED, EPISODES = 16, 4, 2, 64


def checkpoint(path: Path, vocab: int = VOCAB) -> str:
    """A random checkpoint of a small model, as `t1jax convert` would make it."""
    document = json.loads((FIXTURES / "ref-a" / "config.json").read_text())
    document["text_config"] |= {
        "vocab_size": vocab,
        "full_attention_interval": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }
    params = init_params(Qwen3_5(from_huggingface(document)), jax.random.key(0))
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path / "params", args=ocp.args.PyTreeSave(params))
    (path / "config.json").write_text(json.dumps(document))
    manifest = {
        "format": FORMAT,
        "config": document,
        "cast_to": "float32",
        "source": {"prefix": "model.language_model.", "experts": "fused", "tensors": {}},
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    return str(path)


def config(run: Path, source: str, **sections) -> Config:
    """A config of the bandit; sections are merged into it."""
    rate = {"learning_rate": 0.004, "weight_decay": 0.0}
    batch = {"tokens": 32, "rows": 8}
    tree = {
        "run": str(run),
        "model": {"checkpoint": source, "dtype": "float32"},
        "checkpoints": {"every_steps": 100, "min_free_mb": 1},
        "sampler": {"context": 64},
        "agent": {"context_tokens": 64},
        "ppo": {
            "steps": 12, "launch": EPISODES, "batch_trajectories": EPISODES, "staleness": 0,
            "actor": rate, "critic": rate, "batch": batch,
        },
    }  # fmt: skip
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return parse_config(tree, "test")


class Bandit:
    """Collects and takes weights. `calls` says what was asked, for tests of order."""

    def __init__(self, setup: Setup, sampler, *, broken=None):
        self._setup, self._sampler, self._broken = setup, sampler, broken
        self.calls: list[tuple] = []
        self.served = None

    async def publish(self, params, version):
        self.served = params, version
        self.calls.append(("publish", version))

    async def collect(self, step, version, tasks, *, wanted):
        self.calls.append(("collect", step, version))
        assert self.served[1] == version
        if self._broken is not None:
            self._broken("rollout", step)
        await asyncio.sleep(0)
        params = self.served[0]
        drawn = await asyncio.to_thread(self._sampler, params, step)
        made = tuple(map(self._trajectory, *drawn, [version] * EPISODES))
        return Rollout(trajectories=made[:wanted], counts={"launched": EPISODES})

    def _trajectory(self, ids, logprobs, routes, version):
        recorder = Recorder(self._setup.shape)
        recorder.append_context(ids[:2])
        recorder.append_sampled(ids[2:], logprobs, version=version, finish=Finish.stop)
        recorder.record_routes(0, routes)
        reward = float(np.mean(ids[2:] == target(ids[0])))
        outcome = "solved" if reward == 1 else "partial"
        task = f"bandit/{ids[0]}"
        return recorder.finish(Ending(task=task, outcome=outcome, reward=reward))


def target(prompt: int) -> int:
    return (5 * prompt + 3) % VOCAB


def make_sampler(setup: Setup):
    """(params, step) -> ids [N, 4], logprobs [N, 2], routes [N, 3, L, C], in numpy."""
    T = 2 + SAMPLED

    @jax.jit
    def draw(params, key):
        prompt_B1 = jnp.arange(EPISODES, dtype=jnp.int32)[:, None] % PROMPTS
        ids_BT = jnp.concatenate([prompt_B1, jnp.ones_like(prompt_B1)], axis=1)
        ids_BT = jnp.pad(ids_BT, ((0, 0), (0, SAMPLED)))
        logprobs = []
        for t in range(2, T):
            model = bind(setup.policy, params)
            out = model(ids_BT, run=setup.run)
            logits_BV = model.head(out.hidden_BTD[:, t - 1 : t], setup.run)[:, 0]
            logp_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32))
            token_B = jax.random.categorical(jax.random.fold_in(key, t), logp_BV)
            token_B = token_B.astype(jnp.int32)
            ids_BT = ids_BT.at[:, t].set(token_B)
            logprobs.append(jnp.take_along_axis(logp_BV, token_B[:, None], axis=1)[:, 0])
        out = bind(setup.policy, params)(ids_BT, run=setup.run)
        routes = jnp.transpose(out.routes_LBTC, (1, 2, 0, 3))[:, :-1]
        return ids_BT, jnp.stack(logprobs, axis=1), routes

    def sample(params, step):
        return [np.asarray(x) for x in draw(params, jax.random.key(step))]

    return sample
