"""`make demo`: a tiny model from nothing to scored text, by the functions that the commands call.

    init-tiny -> convert -> tokenise -> score -> score with the routes just recorded

Checkpoints that an earlier run left are used again; scores are made anew. The weights are random:
the log-probs are near those of a uniform guess, and what the demo shows is that replaying the
router's own choices changes nothing. In the table `log-prob` is the mean per token, `max diff` the
largest difference of one token's, `replaced` the share of routes where the live router disagreed.
"""

import math
from pathlib import Path

import numpy as np
from etils import epath
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from t1jax.checkpoint.convert import convert
from t1jax.checkpoint.init_tiny import init_tiny
from t1jax.checkpoint.tensor_files import read_json
from t1jax.model.config import from_huggingface
from t1jax.progress import Progress
from t1jax.score import Summary, score

# At most 64 tokens each, so that all four share one program.
TEXTS = (
    "$ ls -la\ntotal 8\n-rw-r--r-- 1 root root  512 Jan  1 00:00 README.md\n"
    "$ wc -l < README.md\n37\n",
    "$ python3 main.py --input data.csv\nTraceback (most recent call last):\n"
    "FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'\n",
    '$ grep -rn "TODO" src | head -n 2\nsrc/parser.py:12:    # TODO: handle empty input\n'
    "src/parser.py:40:    # TODO: report the line number\n",
    "$ for name in a b c; do echo $name >> names.txt; done\n"
    "$ sort -r names.txt | uniq -c\n      1 c\n      1 b\n      1 a\n",
)
SHOWN = 24  # characters of a text in the table


def demo(out: str) -> None:
    """Makes, converts and scores a tiny model in the directory `out`, and shows what came of it."""
    folder, console = Path(out), Console(highlight=False, soft_wrap=True)
    folder.mkdir(parents=True, exist_ok=True)
    published, checkpoint = folder / "published", folder / "checkpoint"
    with Progress() as progress:
        if not published.exists():
            init_tiny(published, progress=progress)
        if not checkpoint.exists():
            convert(published, checkpoint, verify=True, progress=progress)
    texts, live, replayed = (
        folder / f"{name}.safetensors" for name in ("texts", "live", "replayed")
    )
    _write_texts(checkpoint, texts)
    console.print("\n[bold]score[/bold] with the live router")
    score(str(checkpoint), str(texts), str(live))
    _add_routes(texts, live)
    console.print("\n[bold]score --replay[/bold] with the routes just recorded")
    summary = score(str(checkpoint), str(texts), str(replayed), replay=True, on_missing="error")
    console.print()
    vocab = from_huggingface(read_json(epath.Path(checkpoint) / "config.json")).vocab
    console.print(_table(load_file(texts), load_file(live), load_file(replayed), summary))
    console.print(f"The weights are random: a uniform guess has {-math.log(vocab):.4f} a token.\n")
    for path, what in (
        (published, "the model, as Hugging Face has it"),
        (checkpoint, "the same, converted"),
        (texts, "input_ids, lengths, routed_experts"),
        (live, "logprobs, routed_experts"),
        (replayed, "the same, replayed"),
    ):
        console.print(f"{path}  [dim]{what}[/dim]")


def _write_texts(checkpoint: Path, to: Path) -> None:
    """INPUT of `t1jax score`, with the checkpoint's own tokenizer."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    lengths = np.array([len(row) for row in ids], np.int32)
    input_ids = np.zeros((len(ids), lengths.max()), np.int32)
    for row, values in zip(input_ids, ids, strict=True):
        row[: len(values)] = values
    save_file({"input_ids": input_ids, "lengths": lengths}, to)


def _add_routes(texts: Path, live: Path) -> None:
    routes = {"routed_experts": load_file(live)["routed_experts"]}
    save_file(load_file(texts) | routes, texts)


def _table(
    texts: dict[str, np.ndarray],
    live: dict[str, np.ndarray],
    replayed: dict[str, np.ndarray],
    summary: Summary,
) -> Table:
    title = f"replay_replace_rate {summary.replay_replace_rate:.4f}"
    table = Table(title=title, title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("text", "tokens", "log-prob", "replayed", "max diff", "replaced"):
        table.add_column(name, justify="left" if name == "text" else "right", no_wrap=True)
    differs = np.sort(live["routed_experts"]) != np.sort(replayed["routed_experts"])
    for row, (text, length) in enumerate(zip(TEXTS, texts["lengths"].tolist(), strict=True)):
        free, forced = (x["logprobs"][row, : length - 1] for x in (live, replayed))
        table.add_row(
            escape(text.splitlines()[0][:SHOWN]),
            str(length),
            f"{free.mean():.4f}",
            f"{forced.mean():.4f}",
            f"{np.abs(free - forced).max():.1e}",
            f"{differs[row, :length].any(axis=-1).mean():.4f}",
        )
    return table
