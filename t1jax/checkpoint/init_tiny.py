"""`t1jax init-tiny`: a small random checkpoint in the published layout, tokenizer included.

Everything that a real one has: both kinds of layer, fused experts, bfloat16 with float32 A_log and
norm, vision and MTP tensors (shapes only; nothing here runs them), generation settings, a
byte-level BPE tokenizer with the published special tokens, a chat template.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from etils import epath
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from t1jax.checkpoint.huggingface import Naming, table
from t1jax.checkpoint.staging import staged
from t1jax.checkpoint.tensor_files import SINGLE, Block, write_file
from t1jax.checkpoint.tiny_induction import add_induction
from t1jax.checkpoint.tiny_text import CHAT_TEMPLATE, corpus
from t1jax.errors import UserError
from t1jax.model.config import ModelConfig, from_huggingface
from t1jax.progress import Progress

# In the published order; True: special (skipped when decoding), False: ordinary text.
ADDED_TOKENS: tuple[tuple[str, bool], ...] = (
    *(
        (f"<|{name}|>", True)
        for name in (
            *("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end"),
            *("box_start", "box_end", "quad_start", "quad_end", "vision_start", "vision_end"),
            *("vision_pad", "image_pad", "video_pad"),
        )
    ),
    *((name, False) for name in ("<tool_call>", "</tool_call>")),
    *((f"<|fim_{name}|>", False) for name in ("prefix", "middle", "suffix", "pad")),
    *((name, False) for name in ("<|repo_name|>", "<|file_sep|>")),
    *((name, False) for name in ("<tool_response>", "</tool_response>", "<think>", "</think>")),
    *((name, True) for name in ("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>")),
    *((name, True) for name in ("<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>")),
)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

EMBEDDING, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"
EMBEDDING_SCALE = 0.5
NOT_RUN = ("model.visual.", "mtp.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a small model; every ratio of the published ones is kept that can be."""

    vocab: int
    layers: int
    embed: int
    heads: int
    head_dim: int
    delta_heads: int  # of values; half as many of keys
    delta_dim: int
    experts: int
    chosen: int
    hidden: int
    induction: bool = False  # starts close to copying: tiny_induction.py


SIZES = {
    "tiny": Size(
        vocab=2048, layers=8, embed=128, heads=4, head_dim=32, delta_heads=8, delta_dim=16,
        experts=16, chosen=4, hidden=64,
    ),
    # Learns the shipped tasks' first level in minutes on two cores: configs/tiny.yaml.
    "demo": Size(
        vocab=1024, layers=4, embed=64, heads=4, head_dim=32, delta_heads=4, delta_dim=16,
        experts=16, chosen=4, hidden=64, induction=True,
    ),
}  # fmt: skip


def init_tiny(
    dst: epath.PathLike, *, seed: int = 0, size: str = "tiny", progress: Progress | None = None
) -> None:
    """Writes a small random checkpoint (tiny: 4 million parameters) as a Hugging Face directory.

    Args:
      dst: must not exist.
      seed: of the weights; the tokenizer does not depend on it.
      size: one of SIZES.
      progress: None shows it on stderr.

    Raises:
      UserError: no such size, or `dst` exists.
    """
    if progress is None:
        with Progress() as progress:
            return init_tiny(dst, seed=seed, size=size, progress=progress)
    if size not in SIZES:
        raise UserError(f"size {size!r} is none of {sorted(SIZES)}")
    tokenizer = train_tokenizer(SIZES[size].vocab)
    ids = {token.content: at for at, token in tokenizer.get_added_tokens_decoder().items()}
    document = config_document(SIZES[size], ids)
    tensors: list[Block] = list(_tensors(document, seed, SIZES[size].induction))
    total_bytes = sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors)
    with staged(dst, total_bytes) as work:
        progress.start("init-tiny", total_bytes)
        _write_json(work / "config.json", document)
        _write_json(work / "generation_config.json", generation_document(ids))
        _write_json(work / "tokenizer_config.json", tokenizer_document(ids))
        (work / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))
        (work / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        write_file(work / SINGLE, tensors, progress)


def _write_json(path: epath.Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")


# ---- weights ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Named:
    """An array with its published name."""

    name: str
    values: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def array(self) -> np.ndarray:
        return self.values


def _tensors(document: dict[str, Any], seed: int, induction: bool) -> Iterator[_Named]:
    config = from_huggingface(document)
    random = np.random.default_rng(seed)
    text = {p.tensor: p.shape for parts in table(config, Naming()).values() for p in parts}
    drawn: dict[str, np.ndarray] = {}
    for name, shape in (text | _vision_shapes(document) | _mtp_shapes(config)).items():
        drawn[name] = _initial(name, shape, random, drawn)
    if induction:
        drawn |= add_induction(drawn, config, random)
    return map(_Named, drawn, drawn.values())


def _initial(
    name: str, shape: tuple[int, ...], random: np.random.Generator, drawn: dict[str, np.ndarray]
) -> np.ndarray:
    """A tensor to train from; `drawn` holds those before it.

    The published 0.02 is a matrix's 1 / sqrt(inputs) at the published widths. At these widths it
    would be several times too little for any layer to be heard.
    """
    if name.endswith("A_log"):
        return np.log(random.uniform(1, 16, shape)).astype(np.float32)
    if name.endswith("linear_attn.norm.weight"):
        return np.ones(shape, np.float32)
    if name.endswith("dt_bias"):
        values = _remembering_bias(shape, random)
    elif "norm" in name:  # all others are zero-centred
        values = np.zeros(shape)
    elif name == HEAD:  # starts as the embedding: what attention finds can be said, so copied
        values = drawn[EMBEDDING].astype(np.float32) / EMBEDDING_SCALE / math.sqrt(shape[-1])
    elif name.startswith(NOT_RUN):
        values = random.normal(0, 0.02, shape)
    else:
        values = random.normal(0, _scale(name, shape), shape)
    return values.astype(np.float32).astype("bfloat16")


def _scale(name: str, shape: tuple[int, ...]) -> float:
    if name == EMBEDDING:
        return EMBEDDING_SCALE
    return 0.1 if "conv1d" in name else shape[-1] ** -0.5


def _remembering_bias(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """b with softplus(b) log-uniform in 0.001..0.1, as the delta net's authors start it.

    A state then keeps between a fifth and all of itself from token to token. From the published
    dt_bias = 1 and rates up to 16, most heads forget at once and learn to remember late or never.
    Source: Gated DeltaNet (Yang et al., 2412.06464), after Mamba (Gu and Dao, 2312.00752).
    """
    step = np.exp(random.uniform(math.log(1e-3), math.log(0.1), shape))
    return np.log(np.expm1(step))


def _vision_shapes(document: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    vision = document["vision_config"]
    D, F, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merged = D * vision["spatial_merge_size"] ** 2
    linears = {
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (vision["out_hidden_size"], merged),
        "patch_embed.proj": (D, vision["in_channels"], vision["temporal_patch_size"], patch, patch),
        "merger.norm": (D,),
    }
    for i in range(vision["depth"]):
        block = f"blocks.{i}."
        linears |= {
            block + "norm1": (D,), block + "norm2": (D,),
            block + "attn.qkv": (3 * D, D), block + "attn.proj": (D, D),
            block + "mlp.linear_fc1": (F, D), block + "mlp.linear_fc2": (D, F),
        }  # fmt: skip
    shapes = {"pos_embed.weight": (vision["num_position_embeddings"], D)}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {f"model.visual.{name}": shape for name, shape in shapes.items()}


def _mtp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """One full-attention layer with its own norms and a projection of [embedding, hidden]."""
    D, a, m = config.embed, config.attention, config.moe
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (D,), "post_attention_layernorm": (D,),
        "self_attn.q_proj": (2 * a.heads * a.head_dim, D),
        "self_attn.k_proj": (a.kv_heads * a.head_dim, D),
        "self_attn.v_proj": (a.kv_heads * a.head_dim, D),
        "self_attn.o_proj": (D, a.heads * a.head_dim),
        "self_attn.q_norm": (a.head_dim,), "self_attn.k_norm": (a.head_dim,),
        "mlp.gate": (m.experts, D), "mlp.shared_expert_gate": (1, D),
    }  # fmt: skip
    widths = {"mlp.shared_expert": m.shared_hidden}
    widths |= {f"mlp.experts.{e}": m.hidden for e in range(m.experts)}
    for name, F in widths.items():
        layer |= {f"{name}.gate_proj": (F, D), f"{name}.up_proj": (F, D)}
        layer |= {f"{name}.down_proj": (D, F)}
    shapes = {f"layers.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"fc": (D, 2 * D), "norm": (D,)}
    shapes |= {"pre_fc_norm_embedding": (D,), "pre_fc_norm_hidden": (D,)}
    return {f"mtp.{name}.weight": shape for name, shape in shapes.items()}


# ---- configs ------------------------------------------------------------------------------------


def config_document(size: Size, ids: dict[str, int]) -> dict[str, Any]:
    """config.json, with the fields that the published files have."""
    kinds = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
    text = {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
        "bos_token_id": None, "dtype": "bfloat16", "eos_token_id": ids["<|endoftext|>"],
        "full_attention_interval": 4, "head_dim": size.head_dim, "hidden_act": "silu",
        "hidden_size": size.embed, "initializer_range": 0.02,
        "layer_types": list(kinds) * (size.layers // 4),
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": size.delta_dim,
        "linear_num_key_heads": size.delta_heads // 2, "linear_num_value_heads": size.delta_heads,
        "linear_value_head_dim": size.delta_dim, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 32768, "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": size.hidden, "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": size.heads,
        "num_experts": size.experts, "num_experts_per_tok": size.chosen,
        "num_hidden_layers": size.layers, "num_key_value_heads": 2,
        "output_router_logits": False, "pad_token_id": None, "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
        "shared_expert_intermediate_size": size.hidden, "tie_word_embeddings": False,
        "use_cache": True, "vocab_size": size.vocab,
    }  # fmt: skip
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "dtype": "bfloat16",
        "image_token_id": ids["<|image_pad|>"], "model_type": "qwen3_5_moe", "text_config": text,
        "tie_word_embeddings": False, "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            "deepstack_visual_indexes": [], "depth": 1, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32, "in_channels": 3, "initializer_range": 0.02,
            "intermediate_size": 64, "model_type": "qwen3_5_moe", "num_heads": 2,
            "num_position_embeddings": 16, "out_hidden_size": size.embed, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }  # fmt: skip


def generation_document(ids: dict[str, int]) -> dict[str, Any]:
    """generation_config.json; a chat ends with <|im_end|>, which config.json does not say."""
    return {
        "bos_token_id": ids["<|endoftext|>"], "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"], "temperature": 0.6, "top_k": 20, "top_p": 0.95,
    }  # fmt: skip


def tokenizer_document(ids: dict[str, int]) -> dict[str, Any]:
    """tokenizer_config.json."""
    added = {
        str(ids[name]): {
            "content": name, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": special,
        }
        for name, special in ADDED_TOKENS
    }  # fmt: skip
    return {
        "add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": added,
        "bos_token": None, "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>",
        "errors": "replace", "model_max_length": 32768, "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None,
    }  # fmt: skip


def train_tokenizer(vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer, split as the published one, of at most `vocab` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(WORDS), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(ADDED_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens(
        [AddedToken(name, special=special, normalized=False) for name, special in ADDED_TOKENS]
    )
    return tokenizer
