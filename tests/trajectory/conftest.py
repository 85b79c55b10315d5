"""Tokenizers: the published one (248,044 words and 33 added tokens) and init-tiny's."""

import gzip
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from t1jax.checkpoint.init_tiny import SIZES, train_tokenizer
from t1jax.trajectory.chat import Chat

PUBLISHED = Path(__file__).parents[1] / "fixtures" / "chat"


@pytest.fixture(scope="session")
def chat() -> Chat:
    """The published one's."""
    packed = (PUBLISHED / "qwen35_tokenizer.json.gz").read_bytes()
    return Chat(Tokenizer.from_str(gzip.decompress(packed).decode()))


@pytest.fixture(scope="session")
def tiny_chat() -> Chat:
    """init-tiny's."""
    return Chat(train_tokenizer(SIZES["tiny"].vocab))
