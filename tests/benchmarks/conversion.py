"""`t1jax convert` against copying the same files: speed and peak memory.

    python tests/benchmarks/conversion.py [--size small|large] [--pairs N] [--layout per_expert]

Writes a synthetic bfloat16 checkpoint with the published names into a temporary directory (large:
4 GB; three times that is needed on disk), then takes turns: copy its files, convert it, and so on.
A conversion is the whole command in its own process, imports included. Speed is the ratio of
neighbouring runs; memory is the process's peak resident set, which counts what it maps of the
source, against the largest file + the largest stacked parameter + 0.5 GB.

The physics: a copy moves each byte twice; a conversion also transposes it (a strided read a word)
and hashes the source. Files are in the page cache for both, and neither waits for the disk.
The last line is one JSON document.
"""

import argparse
import dataclasses
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from t1jax.checkpoint.huggingface import Naming, table
from t1jax.checkpoint.tensor_files import INDEX, index_of, into_shards, nbytes, write_file
from t1jax.model.config import from_huggingface
from t1jax.progress import Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    layers: int
    embed: int
    experts: int
    vocab: int
    shard_bytes: int


SIZES = {
    "small": Sizes(layers=8, embed=1024, experts=32, vocab=16384, shard_bytes=250 * 10**6),
    "large": Sizes(layers=8, embed=2048, experts=64, vocab=65536, shard_bytes=10**9),
}
HIDDEN = 512
SPEED_TARGET = 0.5  # of copying
ROOM_BYTES = 0.5e9

CHILD = """
import json, resource, sys
from t1jax.checkpoint.convert import convert
convert(sys.argv[1], sys.argv[2])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"peak_bytes": peak}))
"""


def config_document(sizes: Sizes) -> dict[str, Any]:
    """A config.json of these sizes, with the ratios of the published models."""
    text = {
        "model_type": "qwen3_5_moe_text", "vocab_size": sizes.vocab, "hidden_size": sizes.embed,
        "num_hidden_layers": sizes.layers, "full_attention_interval": 4, "head_dim": 256,
        "num_attention_heads": sizes.embed // 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "linear_num_key_heads": sizes.embed // 256, "linear_num_value_heads": sizes.embed // 128,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "num_experts": sizes.experts, "num_experts_per_tok": 8, "moe_intermediate_size": HIDDEN,
        "shared_expert_intermediate_size": HIDDEN, "rope_parameters": {"rope_theta": 1e7},
    }  # fmt: skip
    return {"model_type": "qwen3_5_moe", "text_config": text}


class Noise:
    """A tensor of random bits, made when it is written."""

    POOL = np.random.default_rng(0).integers(0, 2**16, 2**22 + 2**12, np.uint16)

    def __init__(self, name: str, shape: tuple[int, ...], number: int):
        self.name, self.shape, self._number = name, shape, number
        self.dtype = np.dtype("bfloat16")

    def array(self) -> np.ndarray:
        out = np.empty(math.prod(self.shape), np.uint16)
        start = self._number % 2**12
        for first in range(0, out.size, 2**22):
            piece = out[first : first + 2**22]
            piece[...] = self.POOL[start : start + piece.size]
        return out.view(self.dtype).reshape(self.shape)


def write_checkpoint(directory: Path, layout: str, sizes: Sizes) -> dict[str, int]:
    """Writes the synthetic checkpoint; returns its size and what bounds a conversion's memory."""
    document = config_document(sizes)
    config = from_huggingface(document)
    rows = table(config, Naming(experts=layout))
    shapes = {part.tensor: part.shape for parts in rows.values() for part in parts}
    tensors = [Noise(name, shape, i) for i, (name, shape) in enumerate(shapes.items())]
    shards = into_shards(sorted(tensors, key=lambda t: _layer_of(t.name)), sizes.shard_bytes)
    with Progress() as progress:
        progress.start("write the source", sum(map(nbytes, tensors)))
        for name, held in shards.items():
            write_file(directory / name, held, progress)
    (directory / INDEX).write_text(index_of(shards))
    (directory / "config.json").write_text(json.dumps(document))
    files = [file.stat().st_size for file in directory.iterdir()]
    gate_up = sizes.experts * sizes.embed * 2 * HIDDEN
    return {
        "total": sum(files),
        "largest_file": max(files),
        "largest_parameter": 2 * config.groups * gate_up,
    }


def _layer_of(name: str) -> int:
    return next((int(piece) for piece in name.split(".") if piece.isdigit()), -1)


def copy(src: Path, dst: Path) -> float:
    start = time.perf_counter()
    shutil.copytree(src, dst)
    return time.perf_counter() - start


def convert(src: Path, dst: Path) -> tuple[float, int]:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(src), str(dst)],
        check=True, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    return time.perf_counter() - start, json.loads(done.stdout)["peak_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--layout", choices=("fused", "per_expert"), default="fused")
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    copies, conversions, peaks = [], [], []
    with tempfile.TemporaryDirectory(prefix="conversion-") as folder:
        src, dst = Path(folder) / "src", Path(folder) / "dst"
        src.mkdir()
        sizes = write_checkpoint(src, options.layout, SIZES[options.size])
        for _ in range(options.pairs):
            for run in (copy, convert):
                os.sync()
                outcome = run(src, dst)
                shutil.rmtree(dst)
                if run is copy:
                    copies.append(outcome)
                else:
                    conversions.append(outcome[0])
                    peaks.append(outcome[1])
    report(options, sizes, copies, conversions, peaks)


def report(options, sizes, copies, conversions, peaks) -> None:
    rate = lambda seconds: sizes["total"] / statistics.median(seconds) / 1e9  # noqa: E731
    ratio = statistics.median(a / b for a, b in zip(copies, conversions, strict=True))
    bound = sizes["largest_file"] + sizes["largest_parameter"] + ROOM_BYTES
    peak = max(peaks)
    print(f"{sizes['total'] / 1e9:.2f} GB, {options.layout} experts, {options.pairs} pairs")
    print(f"copy     {rate(copies):.2f} GB/s")
    print(f"convert  {rate(conversions):.2f} GB/s: {ratio:.2f} of copying, target {SPEED_TARGET}")
    print(f"peak     {peak / 1e9:.2f} GB resident; bound {bound / 1e9:.2f} GB")
    print(
        json.dumps({
            "size": options.size, "layout": options.layout, "bytes": sizes,
            "copy_s": copies, "convert_s": conversions, "speed_of_copy": ratio,
            "peak_bytes": peak, "bound_bytes": bound,
            "met": ratio >= SPEED_TARGET and peak <= bound,
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
