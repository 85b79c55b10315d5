"""Errors that a person can act on, and the exit status that each becomes.

Knows nothing of what failed: whoever raises writes the whole message (what, its value, what was
expected, what to do).
"""

import signal

OK = 0
FAILED = 1
BAD_USAGE = 2  # the command line itself; typer ends with it
PREEMPTED = 75  # EX_TEMPFAIL: run the same command again and it goes on


class UserError(Exception):
    """Something that the caller, a file or a machine caused; the message says what to do."""


class Preempted(Exception):  # noqa: N818 - it is no error: the work is saved and can go on
    """The machine was taken away after the state was saved; the same command resumes."""

    number = signal.SIGTERM  # the signal that came


def exit_status(error: BaseException) -> int:
    """The exit status of a command that ended with this exception."""
    return PREEMPTED if isinstance(error, Preempted) else FAILED


def is_expected(error: BaseException) -> bool:
    """True where the message alone tells a person enough, so that a traceback is only noise.

    ValueError and OSError count: they are what checks of arguments and files raise.
    """
    return isinstance(error, UserError | Preempted | ValueError | OSError)


def one_line(error: BaseException) -> str:
    """The message on one line; the exception's name where it has none or names a bug."""
    message = " ".join(str(error).split())
    if is_expected(error) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
