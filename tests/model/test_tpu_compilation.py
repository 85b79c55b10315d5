"""The model's training program lowers and compiles for TPU, ahead of time and without one.

Forward and backward on v5e:2x2 at small widths, with both dispatch strategies. In a process of its
own: libtpu (extra `tpu`) wants environment variables before JAX starts. What it proves is that the
program is legal for TPU; no number comes out of it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import jax, jax.numpy as jnp, json, sys
from jax.experimental import topologies
from t1jax.model.config import AttentionConfig, DeltaConfig, ModelConfig, MoEConfig
from t1jax.model.execution import default_execution
from t1jax.model.qwen3_5 import Qwen3_5, abstract_params, bind
from t1jax.model.sharding import make_mesh

mesh, dispatch = sys.argv[1:]
config = ModelConfig(
    vocab=256, embed=128, layers=2, pattern=("delta", "attention"), rms_eps=1e-6,
    attention=AttentionConfig(heads=4, kv_heads=2, head_dim=128, rope_theta=1e7, rotary_dims=32),
    delta=DeltaConfig(key_heads=1, value_heads=2, key_dim=128, value_dim=128, conv_width=4),
    moe=MoEConfig(experts=8, chosen=2, hidden=128, shared_hidden=128),
)
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
run = default_execution(make_mesh(mesh, devices=devices), dispatch=dispatch, remat="full")
model = Qwen3_5(config)

def loss(params, tokens):
    bound = bind(model, params)
    out = bound(tokens, run=run)
    return bound.head.logprobs(out.hidden_BTD, tokens, run).mean()

params = abstract_params(model, run.mesh, "bfloat16")
tokens = jax.ShapeDtypeStruct((4, 256), jnp.int32)
program = jax.jit(jax.value_and_grad(loss)).lower(params, tokens).compile()
text = program.as_text()
print(json.dumps({
    "attention": run.attention,
    "splash": "splash" in text,
    "exchange": "ragged-all-to-all" in text,
    "bytes": program.memory_analysis().temp_size_in_bytes,
}))
"""

pytestmark = pytest.mark.tpu


@pytest.mark.parametrize(
    "mesh, dispatch", [("data=2,expert=2", "gather"), ("expert=4", "ragged_all_to_all")]
)
def test_forward_and_backward_compile_for_tpu(mesh, dispatch):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
    environment |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # another test process may compile too
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mesh, dispatch],
        env=environment, capture_output=True, text=True, timeout=1200,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["attention"] == "splash" and found["splash"] and found["bytes"] > 0
    assert found["exchange"] == (dispatch == "ragged_all_to_all")
