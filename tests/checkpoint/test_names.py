"""The table between published tensors and parameters, on literals small enough to read."""

import itertools
import json

import jax
import numpy as np
import pytest

from t1jax.checkpoint.huggingface import LAYOUTS, PREFIXES, Naming, load_params, table, to_published
from t1jax.checkpoint.parts import fill
from t1jax.checkpoint.trees import flatten
from t1jax.model.config import from_huggingface
from t1jax.model.qwen3_5 import Qwen3_5, declarations
from t1jax.model.sharding import make_mesh

from . import made

SMALL = from_huggingface(made.document())
PREFIX = "model.language_model.layers."


def parameter(config, path, tensors):
    """A parameter filled from these tensors, and nothing else."""
    shape = declarations(Qwen3_5(config))[path].get_value().shape
    out = np.full(shape, -1.0, np.float32)
    parts = [part for part in table(config, Naming())[path] if part.tensor in tensors]
    fill(out, (0,) * out.ndim, parts, tensors.__getitem__)
    return out


def test_q_proj_alternates_queries_and_gates_head_by_head():
    """2 heads of 2: rows {0,1} and {4,5} are queries, {2,3} and {6,7} gates."""
    rows = np.repeat(np.arange(8.0, dtype=np.float32)[:, None], 4, axis=1)
    tensors = {PREFIX + "3.self_attn.q_proj.weight": rows}
    q, gate = (
        parameter(SMALL, ("groups", "layer_3", "mixer", name), tensors)[0] for name in ("q", "gate")
    )
    for d in range(4):  # every column of a row is the same
        np.testing.assert_array_equal(q[d], [[0, 1], [4, 5]])
        np.testing.assert_array_equal(gate[d], [[2, 3], [6, 7]])


def test_in_proj_qkv_and_conv1d_are_all_queries_then_all_keys_then_all_values():
    """1 key head of 2, 2 value heads of 3: channels 0-1 q, 2-3 k, 4-9 v; the last tap is now."""
    tensors = {
        PREFIX + "0.linear_attn.in_proj_qkv.weight": np.outer(np.arange(10), np.ones(4)),
        PREFIX + "0.linear_attn.conv1d.weight": np.arange(40.0).reshape(10, 1, 4),
    }
    tensors = {name: values.astype(np.float32) for name, values in tensors.items()}
    get = lambda name: parameter(SMALL, ("groups", "layer_0", "mixer", name), tensors)[0]  # noqa: E731
    np.testing.assert_array_equal(get("q")[0], [[0, 1]])
    np.testing.assert_array_equal(get("k")[0], [[2, 3]])
    np.testing.assert_array_equal(get("v")[0], [[4, 5, 6], [7, 8, 9]])
    np.testing.assert_array_equal(get("q_conv"), [[[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]]])
    np.testing.assert_array_equal(get("v_conv")[3], [[19, 23, 27], [31, 35, 39]])


def test_square_experts_keep_rows_columns_gate_and_up_apart():
    """3 experts, width and hidden 4: the digits of a number say expert, row, column."""
    experts, rows, columns = np.ogrid[0:3, 0:8, 0:4]
    tensors = {
        PREFIX + "0.mlp.experts.gate_up_proj": 100 * experts + 10 * rows + columns,
        PREFIX + "0.mlp.experts.down_proj": (100 * experts + 10 * rows + columns)[:, :4],
    }
    tensors = {name: values.astype(np.float32) for name, values in tensors.items()}
    gate_up, down = (
        parameter(SMALL, ("groups", "layer_0", "moe", name), tensors)[0]
        for name in ("gate_up", "down")
    )
    for e, d, f in itertools.product(range(3), range(4), range(4)):
        assert gate_up[e, d, 0, f] == 100 * e + 10 * f + d  # row f of the gate half
        assert gate_up[e, d, 1, f] == 100 * e + 10 * (4 + f) + d
        assert down[e, f, d] == 100 * e + 10 * d + f


@pytest.mark.parametrize("experts", LAYOUTS)
@pytest.mark.parametrize("head", ["lm", "value"])
def test_every_parameter_has_parts_and_they_cover_it_once(experts, head):
    rows = table(SMALL, Naming(experts=experts), head)
    declared = declarations(Qwen3_5(SMALL, head))
    assert set(declared) - set(rows) == (
        set() if head == "lm" else {("head", "weight"), ("head", "bias")}
    )
    assert set(rows) <= set(declared)
    for path, parts in rows.items():
        count = np.zeros(declared[path].get_value().shape, np.int32)
        for part in parts:
            count[part.index] += part.view(np.ones(part.shape, np.int32))
        assert (count == 1).all(), path


@pytest.mark.parametrize("experts", LAYOUTS)
def test_every_published_number_goes_to_exactly_one_place(experts):
    rows = table(SMALL, Naming(experts=experts))
    published = {part.tensor: part for parts in rows.values() for part in parts}
    used = {name: np.zeros(part.shape, np.int32) for name, part in published.items()}
    for part in itertools.chain.from_iterable(rows.values()):
        part.view(used[part.tensor])[...] += 1
    assert all((count == 1).all() for count in used.values())


def test_layer_l_stays_layer_l_over_twelve_groups_of_four(tmp_path):
    document = made.document(num_hidden_layers=48)
    tensors = {
        name: np.full(shape, name.split(".")[3] if ".layers." in name else -1, np.float32)
        for name, shape in made.shapes(document).items()
    }
    model = Qwen3_5(from_huggingface(document))
    params = load_params(made.write(tmp_path / "src", document, tensors), model)
    for path, values in flatten(params).items():
        if path[0] == "groups":
            first = int(path[1].removeprefix("layer_"))
            for group in range(12):
                assert (np.asarray(values)[group] == 4 * group + first).all(), path
    for name, values in to_published(params, model.config):
        np.testing.assert_array_equal(values, tensors[name], err_msg=name)


@pytest.mark.parametrize("experts", LAYOUTS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_and_expert_layouts_give_the_same_parameters(tmp_path, prefix, experts):
    naming = Naming(prefix, experts)
    model, document = Qwen3_5(SMALL), made.document()
    usual = load_params(made.write(tmp_path / "usual", document, made.random(document)), model)
    tensors = dict(to_published(usual, SMALL, naming))
    assert set(tensors) == set(made.shapes(document, naming))
    other = load_params(made.write(tmp_path / "other", document, tensors), model)
    jax.tree.map(np.testing.assert_array_equal, usual, other)


def test_the_flat_text_config_gives_the_same_parameters(tmp_path):
    document = made.document()
    tensors = made.random(document)
    model = Qwen3_5(SMALL)
    whole = load_params(made.write(tmp_path / "whole", document, tensors), model)
    flat = load_params(made.write(tmp_path / "flat", document["text_config"], tensors), model)
    jax.tree.map(np.testing.assert_array_equal, whole, flat)


@pytest.mark.parametrize("mesh", ["fsdp=4,expert=2", "expert=4,tensor=2", "data=2,fsdp=2"])
def test_a_sharded_load_gives_the_whole_loads_values(fixture_dir, mesh):
    document = json.loads((fixture_dir("ref-a") / "config.json").read_text())
    model = Qwen3_5(from_huggingface(document))
    whole = load_params(fixture_dir("ref-a"), model)
    sharded = load_params(fixture_dir("ref-a"), model, mesh=make_mesh(mesh))
    assert any(len(leaf.sharding.device_set) > 1 for leaf in jax.tree.leaves(sharded))
    jax.tree.map(np.testing.assert_array_equal, whole, sharded)


def test_a_cast_leaves_the_float32_parameters_alone(fixture_dir):
    document = json.loads((fixture_dir("ref-b") / "config.json").read_text())
    model = Qwen3_5(from_huggingface(document))
    cast = flatten(load_params(fixture_dir("ref-b"), model, dtype="bfloat16"))
    wide = {path for path, leaf in cast.items() if leaf.dtype == np.float32}
    assert {path[-1] for path in wide} == {"log_rate", "scale"}
    assert {path[-2] for path in wide} == {"mixer"}


def test_a_value_head_starts_at_zero_on_the_language_models_backbone(fixture_dir):
    document = json.loads((fixture_dir("ref-a") / "config.json").read_text())
    config = from_huggingface(document)
    policy = load_params(fixture_dir("ref-a"), Qwen3_5(config))
    critic = load_params(fixture_dir("ref-a"), Qwen3_5(config, "value"))
    assert not any(np.asarray(leaf).any() for leaf in critic.pop("head").values())
    del policy["head"]
    jax.tree.map(np.testing.assert_array_equal, policy, critic)


@pytest.mark.parametrize("name", ["ref-a", "ref-b"])
def test_gradients_get_the_reference_modules_names(fixture_dir, name):
    document = json.loads((fixture_dir(name) / "config.json").read_text())
    ours = made.shapes(document, Naming(prefix="model."))
    with np.load(fixture_dir(name) / "grads.npz") as golden:
        for key in golden:
            if key.startswith("grad:"):
                tensor, bracket, _ = key.removeprefix("grad:").partition("[")
                shape = ours[tensor][1:] if bracket else ours[tensor]
                assert golden[key].shape == shape, key
