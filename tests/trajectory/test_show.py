"""What `t1jax trajectory show` prints: plain and coloured, finished and not, and never obeyed."""

import io as text_io
import subprocess
import sys

import numpy as np
import pytest

from t1jax.errors import UserError
from t1jax.trajectory import io
from t1jax.trajectory.record import Ending, Finish, RouteShape
from t1jax.trajectory.recorder import Recorder
from t1jax.trajectory.show import loads, show, visible

from .made import SHAPE, rows, turn, two_turns


class Terminal(text_io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def saved(tmp_path, tiny_chat):
    """A turn of reasoning, a hostile tool result, a cut emoji; with its tokenizer."""
    recorder = Recorder(SHAPE)
    recorder.append_context(tiny_chat.opening([{"role": "user", "content": "Count [bold]files"}]))
    said = tiny_chat.encode_text("I count 🙂 now")
    end = tiny_chat.tokenizer.token_to_id("<|im_end|>")
    logprobs = np.full(len(said) + 1, -0.01)
    logprobs[2], logprobs[-1] = -7.5, -2.0
    ids = np.append(said, end)
    recorder.append_sampled(ids, logprobs, version=4, finish=Finish.stop)
    result = {"role": "tool", "content": "\x1b[2J\x07gone\x9b1m\u202e"}
    recorder.append_context(tiny_chat.following([result], last=end))
    recorder.record_routes(0, rows(0, len(recorder) - 1))
    ending = Ending(task="demo/count", outcome="failed", reward=None, timings={"agent": 3.25})
    io.save_trajectory(recorder.finish(ending), tmp_path / "t")
    tiny_chat.tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def shown(path, stream=None, **options) -> str:
    stream = stream or text_io.StringIO()
    show(str(path), stream=stream, **options)
    return stream.getvalue()


def test_plain_output_says_everything_and_has_no_escapes(saved):
    text = shown(saved / "t", tokenizer=str(saved))
    for expected in (
        "demo/count", "none: not graded", "agent 3.2", "strict 0, normalised 0", "version 4",
        "raw, temperature 1", "turn 0 given", "Count [bold]files", "turn 0 sampled",
        "I count 🙂 now<|im_end|>", "-7.50 at", "given, never read", "8 layers x 8 of 64 experts",
    ):  # fmt: skip
        assert expected in text
    assert "\x1b" not in text
    assert r"\x1b[2J\x07gone\x9b1m\u202e" in text


def test_a_terminal_gets_colours_but_nothing_that_a_tool_printed(saved):
    text = shown(saved / "t", Terminal(), tokenizer=str(saved))
    assert "\x1b[" in text
    assert "\x1b[2J" not in text
    assert not {"\x07", "\x9b", "\u202e"} & set(text)
    assert "🙂" in text


def test_ids_are_shown_without_a_tokenizer(tmp_path):
    io.save_trajectory(two_turns(), tmp_path / "t")
    text = shown(tmp_path / "t")
    assert "10 11 12" in text
    assert "20 21" in text
    text = shown(tmp_path / "t", turns="1:2")
    assert "10 11 12" not in text
    assert "22 23" in text


def test_long_context_keeps_its_ends(tmp_path):
    recorder = Recorder(SHAPE)
    turn(recorder, list(range(1000, 3000)), [5])
    io.save_trajectory(recorder.finish(Ending(task="a", outcome="b", reward=0.0)), tmp_path / "t")
    text = shown(tmp_path / "t", context_characters=40)
    assert "1000 1001" in text
    assert "2998 2999" in text
    assert "2000" not in text.split("turn 0 given")[1]


def test_an_unfinished_trajectory_is_shown_as_far_as_it_went(tmp_path):
    with io.Writer(tmp_path / "t", SHAPE) as writer:
        turn(writer.recorder, [1, 2], [3])
    text = shown(tmp_path / "t.incomplete")
    assert "incomplete" in text
    assert "1 2" in text


def test_loads_count_experts():
    recorder = Recorder(RouteShape(layers=2, chosen=2, experts=4))
    recorder.append_context(np.arange(5))
    recorder.record_routes(0, np.array([[[0, 1], [3, 2]]] * 3 + [[[0, 2], [2, 3]]], np.uint8))
    (chunk,) = recorder.finish(Ending(task="a", outcome="b", reward=0.0)).chunks
    first, second = loads(chunk)
    assert (first.used, first.busiest, first.share) == (3, 0, 0.5)
    shares = np.array([4, 3, 1]) / 8
    assert first.balance == pytest.approx(-(shares * np.log(shares)).sum() / np.log(4))
    assert (second.used, second.share, second.balance) == (2, 0.5, pytest.approx(0.5))


def test_line_breaks_and_tabs_stay():
    assert visible("a\tb\nc\rd\0é") == "a\tb\nc\\rd\\x00é".replace("\\r", "\\x0d")


@pytest.mark.parametrize("turns", ["3", "a:b", "1:-1"])
def test_a_range_that_is_none_is_refused(tmp_path, turns):
    with pytest.raises(UserError, match="is no range"):
        show(str(tmp_path), turns=turns)


def test_the_command(saved):
    command = [sys.executable, "-c", "from t1jax.cli import main; main()", "trajectory", "show"]
    found = subprocess.run([*command, str(saved / "t")], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "demo/count" in found.stdout
    lost = subprocess.run([*command, str(saved / "nowhere")], capture_output=True, text=True)
    assert lost.returncode == 1
    assert "holds no trajectory.json" in lost.stderr.splitlines()[-1]
