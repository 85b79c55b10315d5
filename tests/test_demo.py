"""`t1jax demo`: from nothing to two scores that agree, and again."""

import contextlib
import io

import pytest
from safetensors.numpy import load_file

from t1jax import demo as D


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The demo's folder, and what two runs in it printed."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    return folder, [_run(folder), _run(folder)]


def _run(folder):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        D.demo(str(folder))
    return printed.getvalue()


def test_replaying_the_live_routes_replaces_none(shown):
    folder, (first, _) = shown
    live, replayed = (load_file(folder / f"{n}.safetensors") for n in ("live", "replayed"))
    assert abs(live["logprobs"] - replayed["logprobs"]).max() < 1e-4
    assert (live["routed_experts"] == replayed["routed_experts"]).all()
    assert "replay_replace_rate 0.0000" in first


def test_every_text_and_file_is_shown(shown):
    folder, (first, _) = shown
    for text in D.TEXTS:
        assert text.splitlines()[0][: D.SHOWN] in first
    for name in ("published", "checkpoint"):
        assert f"{folder / name}  " in first
    for name in ("texts", "live", "replayed"):
        assert f"{folder / name}.safetensors  " in first


def test_texts_share_one_program(shown):
    assert shown[1][0].count("of 1 programs") == 2


def test_a_second_run_shows_the_same_table(shown):
    first, second = (text[text.index("replay_replace_rate 0") :] for text in shown[1])
    assert second == first
