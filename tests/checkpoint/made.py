"""Checkpoints made for tests: changed copies of the fixtures, and random ones of given sizes."""

import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from t1jax.checkpoint.huggingface import Naming, table
from t1jax.checkpoint.tensor_files import INDEX, SINGLE, read_directory, write_file
from t1jax.model.config import from_huggingface
from t1jax.progress import Progress

FIXTURES = Path(__file__).parents[1] / "fixtures"
Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Named:
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


def silent() -> Progress:
    return Progress(io.StringIO())


def read(directory: Path) -> Tensors:
    return {name: np.array(t.array()) for name, t in read_directory(directory).items()}


def write(directory: Path, document: dict[str, Any], *files: Tensors) -> Path:
    """A Hugging Face directory of one file or several."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(document))
    names = [f"model-{i:05}.safetensors" for i in range(len(files))] if files[1:] else [SINGLE]
    for name, tensors in zip(names, files, strict=True):
        write_file(directory / name, [Named(*entry) for entry in tensors.items()], silent())
    if len(names) > 1:
        pairs = zip(names, files, strict=True)
        weight_map = {tensor: name for name, tensors in pairs for tensor in tensors}
        (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return directory


def changed(name: str, to: Path, change: Callable[[Tensors], Any]) -> Path:
    """A copy of a fixture, in one file, after `change` has edited its tensors."""
    tensors = read(FIXTURES / name)
    change(tensors)
    return write(to, json.loads((FIXTURES / name / "config.json").read_text()), tensors)


def copied(name: str, to: Path) -> Path:
    """A fixture's weights and configs, to be damaged."""
    to.mkdir(parents=True)
    for file in (FIXTURES / name).iterdir():
        if file.suffix == ".json" or file.name.startswith("model"):
            shutil.copy(file, to)
    return to


def document(**sizes: Any) -> dict[str, Any]:
    """A small config.json; `sizes` are fields of its text_config."""
    text = {
        "model_type": "qwen3_5_moe_text", "vocab_size": 16, "hidden_size": 4,
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2,
        "rms_norm_eps": 1e-6, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 2, "linear_value_head_dim": 3, "linear_conv_kernel_dim": 4,
        "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4,
        "shared_expert_intermediate_size": 4, "full_attention_interval": 4,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }  # fmt: skip
    return {"model_type": "qwen3_5_moe", "text_config": text | sizes}


def shapes(document: dict[str, Any], naming: Naming = Naming()) -> dict[str, tuple[int, ...]]:  # noqa: B008
    rows = table(from_huggingface(document), naming)
    return {part.tensor: part.shape for parts in rows.values() for part in parts}


def random(document: dict[str, Any], naming: Naming = Naming(), dtype: str = "float32") -> Tensors:  # noqa: B008
    generator = np.random.default_rng(0)
    return {
        name: generator.normal(size=shape).astype(np.float32).astype(dtype)
        for name, shape in shapes(document, naming).items()
    }


def assert_same_tensors(left: Path, right: Path) -> None:
    """Same names, dtypes, shapes and bytes."""
    ours, theirs = read_directory(left), read_directory(right)
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        other = theirs[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        assert tensor.array().tobytes() == other.array().tobytes(), name


def left_behind(folder: Path) -> list[str]:
    """What else than the sources lies in a test's folder."""
    return sorted(path.name for path in folder.iterdir() if path.name != "src")
