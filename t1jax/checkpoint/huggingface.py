"""The one table between published tensors and our parameters, and what reads through it.

A parameter is filled by parts. A part names a published tensor and gives a *view* of it: numpy
slices, reshapes and transposes, no arithmetic and no copy. Reading copies out of the view, writing
copies into the same view, so the two directions cannot disagree; every element of a published
tensor lies in exactly one part.

| published, rows | ours |
|---|---|
| q_proj, per head [q, gate] | q, gate [D, N, H] |
| in_proj_qkv [Q all heads, K all heads, V all heads] | q, k [D, J, X], v [D, I, Y] |
| conv1d [channels, 1, taps], channels as in_proj_qkv | q_conv, k_conv [W, J, X], v_conv [W, I, Y] |
| experts.gate_up_proj [E, (gate, up), D] or per expert gate_proj, up_proj | gate_up [E, D, U, F] |
| experts.down_proj [E, D, F] or per expert | down [E, F, D] |

Layer l of the model is row l // n of the stacked parameters of `layer_{l % n}`, n the length of the
repeated pattern.
"""

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from t1jax.checkpoint.fp8 import QUANTISED, SCALE, check_dtypes, dequantise
from t1jax.checkpoint.parts import Part, Table, Use, assemble, fill
from t1jax.checkpoint.tensor_files import (
    MisshapenTensor,
    MissingTensor,
    Recent,
    SetTwice,
    StoredTensor,
    UnknownTensor,
    is_local,
    named,
    read_directory,
    read_json,
)
from t1jax.checkpoint.trees import Path, flatten, put
from t1jax.errors import UserError
from t1jax.model.config import ModelConfig, from_huggingface
from t1jax.model.heads import LMHead
from t1jax.model.qwen3_5 import Params, Qwen3_5, abstract_params

PREFIXES = ("model.language_model.", "model.")
LAYOUTS = ("fused", "per_expert")
CARRIED = ("mtp.", "model.visual.")  # not computed here; kept byte for byte


@dataclasses.dataclass(frozen=True)
class Naming:
    """How a source spells its tensors."""

    prefix: str = PREFIXES[0]
    experts: str = "fused"


# ---- the table ----------------------------------------------------------------------------------


def table(config: ModelConfig, naming: Naming, head: str = "lm") -> Table:
    """Every parameter's parts, by its path in the tree; a value head has no published tensor."""
    rows: Table = {
        ("embed",): _whole(naming.prefix + "embed_tokens.weight", config.vocab, config.embed),
        ("final_norm", "scale"): _whole(naming.prefix + "norm.weight", config.embed),
    }
    if head == "lm":
        rows["head", "weight"] = _linear("lm_head.weight", config.vocab, config.embed)
    period = len(config.pattern)
    for layer in range(config.layers):
        group, position = divmod(layer, period)
        prefix = f"{naming.prefix}layers.{layer}."
        for path, parts in _layer(config, config.pattern[position], naming.experts).items():
            placed = tuple(
                dataclasses.replace(p, tensor=prefix + p.tensor, where=(group, *p.where))
                for p in parts
            )
            full = ("groups", f"layer_{position}", *path)
            rows[full] = rows.get(full, ()) + placed
    return rows


def _layer(config: ModelConfig, kind: str, experts: str) -> Table:
    mixer = _attention(config) if kind == "attention" else _delta_net(config)
    return {
        ("mixer_norm", "scale"): _whole("input_layernorm.weight", config.embed),
        **{("mixer", *path): parts for path, parts in mixer.items()},
        ("moe_norm", "scale"): _whole("post_attention_layernorm.weight", config.embed),
        **{("moe", *path): parts for path, parts in _moe(config, experts).items()},
    }


def _attention(config: ModelConfig) -> Table:
    a, D = config.attention, config.embed
    N, K, H = a.heads, a.kv_heads, a.head_dim
    q_proj = lambda half: Part(  # noqa: E731 - per head: H rows of q, then H rows of gate
        "self_attn.q_proj.weight",
        (2 * N * H, D),
        lambda w: w.reshape(N, 2, H, D)[:, half].transpose(2, 0, 1),
    )
    return {
        ("q",): (q_proj(0),),
        ("gate",): (q_proj(1),),
        ("k",): _heads_in("self_attn.k_proj.weight", K, H, D),
        ("v",): _heads_in("self_attn.v_proj.weight", K, H, D),
        ("out",): _heads_out("self_attn.o_proj.weight", N, H, D),
        ("q_norm", "scale"): _whole("self_attn.q_norm.weight", H),
        ("k_norm", "scale"): _whole("self_attn.k_norm.weight", H),
    }


def _delta_net(config: ModelConfig) -> Table:
    d, D = config.delta, config.embed
    J, I, X, Y, W = d.key_heads, d.value_heads, d.key_dim, d.value_dim, d.conv_width  # noqa: E741
    rows = {"q": (0, J, X), "k": (J * X, J, X), "v": (2 * J * X, I, Y)}  # first row, heads, width
    channels = 2 * J * X + I * Y

    def projection(first: int, heads: int, width: int) -> tuple[Part, ...]:
        return (
            Part(
                "linear_attn.in_proj_qkv.weight",
                (channels, D),
                lambda w: (
                    w[first : first + heads * width].reshape(heads, width, D).transpose(2, 0, 1)
                ),
            ),
        )

    def convolution(first: int, heads: int, width: int) -> tuple[Part, ...]:
        return (
            Part(
                "linear_attn.conv1d.weight",
                (channels, 1, W),
                lambda w: (
                    w[first : first + heads * width].reshape(heads, width, W).transpose(2, 0, 1)
                ),
            ),
        )

    return {
        **{(name,): projection(*at) for name, at in rows.items()},
        ("gate",): _heads_in("linear_attn.in_proj_z.weight", I, Y, D),
        ("write",): _linear("linear_attn.in_proj_b.weight", I, D),
        ("decay",): _linear("linear_attn.in_proj_a.weight", I, D),
        **{(f"{name}_conv",): convolution(*at) for name, at in rows.items()},
        ("log_rate",): _whole("linear_attn.A_log", I),
        ("decay_bias",): _whole("linear_attn.dt_bias", I),
        ("scale",): _whole("linear_attn.norm.weight", Y),
        ("out",): _heads_out("linear_attn.out_proj.weight", I, Y, D),
    }


def _moe(config: ModelConfig, experts: str) -> Table:
    m, D = config.moe, config.embed
    E, F = m.experts, m.hidden
    routed = _fused_experts(E, F, D) if experts == "fused" else _single_experts(E, F, D)
    gate, up = (
        dataclasses.replace(
            *_linear(f"mlp.shared_expert.{name}.weight", m.shared_hidden, D), where=(None, i)
        )
        for i, name in enumerate(("gate_proj", "up_proj"))
    )
    return {
        ("router",): _linear("mlp.gate.weight", E, D),
        **routed,
        ("shared_gate_up",): (gate, up),
        ("shared_down",): _linear("mlp.shared_expert.down_proj.weight", D, m.shared_hidden),
        ("shared_gate",): (Part("mlp.shared_expert_gate.weight", (1, D), lambda w: w[0]),),
    }


def _fused_experts(E: int, F: int, D: int) -> Table:
    gate_up = Part(
        "mlp.experts.gate_up_proj",
        (E, 2 * F, D),
        lambda w: w.reshape(E, 2, F, D).transpose(0, 3, 1, 2),
    )
    down = Part("mlp.experts.down_proj", (E, D, F), lambda w: w.transpose(0, 2, 1))
    return {("gate_up",): (gate_up,), ("down",): (down,)}


def _single_experts(E: int, F: int, D: int) -> Table:
    def part(e: int, name: str, rows: int, columns: int, *where: int | None) -> Part:
        tensor = f"mlp.experts.{e}.{name}.weight"
        return Part(tensor, (rows, columns), np.transpose, (e, *where))

    halves = tuple(enumerate(("gate_proj", "up_proj")))
    gate_up = (part(e, name, F, D, None, i) for e in range(E) for i, name in halves)
    down = (part(e, "down_proj", D, F) for e in range(E))
    return {("gate_up",): tuple(gate_up), ("down",): tuple(down)}


def _whole(tensor: str, *shape: int) -> tuple[Part, ...]:
    return (Part(tensor, shape, lambda w: w),)


def _linear(tensor: str, rows: int, columns: int) -> tuple[Part, ...]:
    return (Part(tensor, (rows, columns), np.transpose),)


def _heads_in(tensor: str, heads: int, width: int, D: int) -> tuple[Part, ...]:
    view = lambda w: w.reshape(heads, width, D).transpose(2, 0, 1)  # noqa: E731
    return (Part(tensor, (heads * width, D), view),)


def _heads_out(tensor: str, heads: int, width: int, D: int) -> tuple[Part, ...]:
    view = lambda w: w.reshape(D, heads, width).transpose(1, 2, 0)  # noqa: E731
    return (Part(tensor, (D, heads * width), view),)


# ---- refusals -----------------------------------------------------------------------------------


def detect_naming(names: Iterable[str]) -> Naming:
    """The prefix and the expert layout of a source, from its tensors' names."""
    names = list(names)
    prefix = next((p for p in PREFIXES if any(n.startswith(f"{p}layers.") for n in names)), "")
    prefix = prefix or PREFIXES[0]
    experts = [n for n in names if n.startswith(f"{prefix}layers.") and ".mlp.experts." in n]
    fused = any(n.endswith(("gate_up_proj", "down_proj")) for n in experts)
    single = any(n.endswith(".weight") for n in experts)
    return Naming(prefix, "fused" if fused or not single else "per_expert")


def check(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, where: str) -> Naming:
    """Refuses a source whose tensors are not exactly the model's, before anything is made of it.

    Args:
      shapes: the source's tensors and their shapes.
      config: the model.
      where: the source, for messages.

    Raises:
      UnknownTensor, MissingTensor, SetTwice, MisshapenTensor: naming tensors and shapes.
    """
    naming = detect_naming(shapes)
    _refuse_mixed_experts(shapes, config, naming.prefix, where)
    expected = {p.tensor: p.shape for parts in table(config, naming).values() for p in parts}
    scaled = {name + SCALE for name in expected}
    others = [n for n in shapes if n not in expected and n not in scaled and not is_carried(n)]
    if others:
        _refuse_others(others, config, naming, where)
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise MissingTensor(
            f"{where} lacks {len(missing)} of the model's {len(expected)} tensors: "
            f"{named(missing)}; expected every one that config.json asks for"
        )
    wrong = [name for name, shape in expected.items() if shapes[name] != shape]
    if wrong:
        each = [f"{name} is {shapes[name]}, expected {expected[name]}" for name in wrong]
        raise MisshapenTensor(f"{where}: {named(each)}; config.json and the weights disagree")
    return naming


def _refuse_mixed_experts(
    names: Collection[str], config: ModelConfig, prefix: str, where: str
) -> None:
    """Layers of one expert layout beside layers of the other: no table reads that."""
    pattern = re.compile(rf"{re.escape(prefix)}layers\.(\d+)\.mlp\.experts\.(\d+\.)?")
    layouts: dict[int, set[str]] = {}
    for found in filter(None, map(pattern.match, names)):
        layouts.setdefault(int(found[1]), set()).add("per_expert" if found[2] else "fused")
    single, fused = (
        sorted(layer for layer, kinds in layouts.items() if kinds == {kind})
        for kind in ("per_expert", "fused")
    )
    if not single or not fused:
        return
    begins = tuple(f"{prefix}layers.{layer}.mlp.experts." for layer in single)
    rows = table(config, Naming(prefix, "per_expert"))
    wanted = [p.tensor for parts in rows.values() for p in parts if p.tensor.startswith(begins)]
    missing = [name for name in wanted if name not in names]
    raise UserError(
        f"{where} mixes expert layouts: one tensor per expert in layers {_listed(single)}, fused "
        f"in layers {_listed(fused)}; use one layout for all layers"
        + (f" (and add what is missing: {named(missing)})" if missing else "")
    )


def _listed(layers: list[int]) -> str:
    return named([str(layer) for layer in layers])


def _refuse_others(others: list[str], config: ModelConfig, naming: Naming, where: str) -> None:
    spellings = itertools.starmap(Naming, itertools.product(PREFIXES, LAYOUTS))
    known = {p.tensor for n in spellings for parts in table(config, n).values() for p in parts}
    twice = [name for name in others if name.removesuffix(SCALE) in known]
    if twice:
        raise SetTwice(
            f"{where} spells its tensors with prefix {naming.prefix!r} and {naming.experts} "
            f"experts, and {named(twice)} would set parameters a second time; keep one spelling"
        )
    raise UnknownTensor(
        f"{where} holds {len(others)} tensors that the model does not have: {named(others)}; "
        f"expected the text model's and {', '.join(p + '*' for p in CARRIED)}"
    )


def is_carried(name: str) -> bool:
    """Whether the tensor is one that t1jax keeps without computing with it."""
    return name.startswith(CARRIED)


# ---- reading ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
    """A checked Hugging Face directory."""

    directory: str
    document: Mapping[str, Any]  # its config.json
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    naming: Naming

    @functools.cached_property
    def _recent(self) -> Recent:
        return Recent(self._whole)

    def published(self, name: str) -> np.ndarray:
        """A tensor's values; block-scaled FP8 comes out as bfloat16."""
        stored = self.tensors[name]
        if stored.dtype == QUANTISED or not is_local(epath.Path(stored.file)):
            return self._recent.get(name)
        return stored.array()

    def _whole(self, name: str) -> np.ndarray:
        values = self.tensors[name].array()
        if values.dtype != QUANTISED:
            return values
        return dequantise(values, self.tensors[name + SCALE].array())

    def dtype(self, path: Path, parts: tuple[Part, ...]) -> np.dtype:
        """The one dtype of a parameter's tensors; refuses tensors that differ."""
        found = {self._dtype(part.tensor): part.tensor for part in parts}
        if len(found) > 1:
            each = ", ".join(f"{name} is {dtype}" for dtype, name in found.items())
            raise UserError(
                f"{self.directory}: parameter {'.'.join(path)} stacks tensors of one dtype; {each}"
            )
        return next(iter(found))

    def _dtype(self, name: str) -> np.dtype:
        stored = self.tensors[name].dtype
        return np.dtype("bfloat16") if stored == QUANTISED else stored


def open_source(directory: epath.PathLike) -> Source:
    """Reads config.json and all headers of a Hugging Face directory, and checks them."""
    if is_local(epath.Path(directory)) and not os.path.isdir(directory):
        what = "is a file" if os.path.exists(directory) else "does not exist"
        raise UserError(f"{directory} {what}; expected the directory of a Hugging Face checkpoint")
    document = read_json(epath.Path(directory) / "config.json")
    config = from_huggingface(document, str(epath.Path(directory) / "config.json"))
    tensors = read_directory(directory)
    naming = check({name: t.shape for name, t in tensors.items()}, config, str(directory))
    text = {name: t for name, t in tensors.items() if not is_carried(name)}
    check_dtypes(text, document, str(directory))
    return Source(str(directory), document, config, tensors, naming)


def load_params(
    directory: epath.PathLike,
    model: Qwen3_5,
    *,
    mesh: jax.sharding.Mesh | None = None,
    dtype: str | None = None,
) -> Params:
    """The parameter tree of a Hugging Face directory, each shard read where it will live.

    Args:
      directory: a checked-out Hugging Face checkpoint, local or gs://.
      model: of the same sizes. A value head starts from its initializer: it has no tensor.
      mesh: where the parameters will live; None: the first device.
      dtype: None keeps the stored dtypes; otherwise all but the float32 ones become it.

    Raises:
      UserError: the directory is not exactly this model's; nothing is loaded then.
    """
    source = open_source(directory)
    if source.config != model.config:
        raise UserError(
            f"{directory} holds {source.config}; expected {model.config}: read the model's sizes "
            "from the same config.json"
        )
    rows = table(source.config, source.naming, head_name(model))
    params: Params = {}
    for path, leaf in flatten(abstract_params(model, mesh, dtype or "float32")).items():
        sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        parts = rows.get(path, ())
        stored = source.dtype(path, parts) if parts else leaf.dtype
        to = stored if dtype is None else leaf.dtype

        def block(index, path=path, leaf=leaf, parts=parts, stored=stored, to=to):
            starts = tuple(s.indices(n)[0] for s, n in zip(index, leaf.shape, strict=True))
            sizes = [len(range(*s.indices(n))) for s, n in zip(index, leaf.shape, strict=True)]
            if not parts:
                return np.zeros(sizes, to)
            out = np.empty(sizes, stored)
            fill(out, starts, parts, source.published)
            return out.astype(to, copy=False)

        put(params, path, jax.make_array_from_callback(leaf.shape, sharding, block))
    return params


def head_name(model: Qwen3_5) -> str:
    """ "lm" or "value"."""
    return "lm" if isinstance(model.head, LMHead) else "value"


# ---- writing ------------------------------------------------------------------------------------


def to_published(
    params: Params, config: ModelConfig, naming: Naming | None = None, head: str = "lm"
) -> Iterator[tuple[str, np.ndarray]]:
    """Published tensors, one at a time, from a parameter tree or any tree like it (gradients).

    Every dtype stays as it is. Gradients under the names of the reference's modules:
    `to_published(grads, config, Naming(prefix="model."))`.
    """
    leaves = {path: np.asarray(leaf) for path, leaf in flatten(params).items()}
    for name, uses in by_tensor(table(config, naming or Naming(), head)).items():
        yield name, assemble(uses, lambda path, index: leaves[path][index])


def by_tensor(rows: Table) -> dict[str, list[Use]]:
    """The table from the other side: for each published tensor the parameters that hold it."""
    takers: dict[str, list[Use]] = {}
    for path, parts in rows.items():
        for part in parts:
            takers.setdefault(part.tensor, []).append((path, part))
    return takers
