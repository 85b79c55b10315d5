"""One view of a run: plain lines, or a table on a terminal that takes over what stages print."""

import io
import re
import sys

import pytest

from t1jax.pipeline.run_view import LINES, View


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """24 lines of 80 characters."""
    for name, value in {"LINES": "24", "COLUMNS": "80", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    return Terminal()


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_elsewhere_than_on_a_terminal_there_are_plain_lines(capsys):
    stream = io.StringIO()
    with View(["one", "two"], {"one": 3.0}, stream=stream) as view, view.running("two"):
        print("of the stage")
    first, second, third = stream.getvalue().splitlines()
    assert (first, second) == ("stage one: done earlier, 3.0 s", "stage two (2 of 2)")
    assert re.fullmatch(r"stage two: done, \d+\.\d s", third)
    assert capsys.readouterr().out == "of the stage\n"


def test_a_terminal_shows_states_seconds_and_the_last_lines_of_the_running_stage(terminal, capsys):
    stages = ["one", "two", "three"]
    with View(stages, {"one": 3.0}, stream=terminal) as view, view.running("two"):
        for number in range(LINES + 3):
            print(f"line {number}", file=sys.stderr if number % 2 else sys.stdout)
        assert not sys.stderr.isatty(), "stages draw no bars of their own"
        view._live.refresh()
    shown = plain(terminal.getvalue())
    assert capsys.readouterr() == ("", "")
    frame = shown[shown.index("✓ one") :]
    assert "✓ one   3 s" in frame and "▶ two" in frame and "· three" in frame
    assert f"line {LINES + 2}" in frame and "line 2" not in frame
    assert "✓ two" in frame[frame.index("▶ two") :]


def test_a_stage_that_fails_is_marked_and_its_last_lines_stay(terminal):
    view = View(["one"], {}, stream=terminal)
    with pytest.raises(ValueError, match="broke"), view, view.running("one"):
        print("the reason")
        raise ValueError("broke")
    last = plain(terminal.getvalue()).rpartition("✗ one")[2]
    assert "the reason" in last


def test_more_stages_than_rows_show_those_around_the_running_one(terminal):
    names = [f"stage{number:02d}" for number in range(40)]
    with View(names, {}, stream=terminal) as view, view.running("stage30"):
        print("what it says")
        view._live.refresh()
        shown = plain(terminal.getvalue())
    assert "▶ stage30" in shown and "stage29" in shown and "stage31" in shown
    assert "what it says" in shown
    assert max(len(re.findall("stage", frame)) for frame in shown.split("▶")) < 24
