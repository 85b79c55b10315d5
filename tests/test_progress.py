"""Plain lines where there is no terminal; a bar where there is one."""

import io
import re

from t1jax.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_elsewhere_each_piece_of_work_ends_in_one_plain_line():
    stream = io.StringIO()
    with Progress(stream, every_s=60.0) as progress:
        progress.start("read", 3_000)
        progress.advance(1_000)
        progress.advance(2_000)
        progress.note("skipped 3 tensors")
        progress.start("write", 10)
    note, read, write = stream.getvalue().splitlines()
    assert note == "skipped 3 tensors"
    assert re.fullmatch(r"read: 3.0 kB done, .*/s, \d+\.\d s", read)
    assert re.fullmatch(r"write: 0 bytes done, .*/s, \d+\.\d s", write)


def test_lines_come_while_work_goes_on():
    stream = io.StringIO()
    with Progress(stream, every_s=0.0) as progress:
        progress.start("read", 2_000)
        progress.advance(500)
        assert stream.getvalue().startswith("read: 500 bytes of 2.0 kB, ")


def test_a_failure_leaves_no_line_that_says_done():
    stream = io.StringIO()
    try:
        with Progress(stream) as progress:
            progress.start("read", 2_000)
            raise ValueError("broken file")
    except ValueError:
        pass
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar():
    stream = Terminal()
    with Progress(stream) as progress:
        progress.start("read", 2_000)
        progress.advance(2_000)
        progress.start("write", 4_000)
        progress.advance(1_000)
        progress.note("half way")
    shown = stream.getvalue()
    assert "read" in shown and "write" in shown and "half way" in shown
