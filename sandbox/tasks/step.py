"""One piece of work of a generated task, and how several become one task.

A family is a tuple of functions that draw a `Step`. A task of a higher level has more steps, each
with names of its own, so that every assertion judges one of them alone.
"""

import dataclasses
from collections.abc import Callable, Mapping

from sandbox.tasks.draw import Draw

Check = tuple[str, str]  # what is promised, in words of a function's name; Python that asserts it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Files that are there, a sentence that asks, commands that do it, and what is then true.

    Checks are Python expressions over the helpers of checks.py. Each is false before the commands
    ran, and none runs anything that the agent wrote: `collect` does, in the agent's own sandbox,
    with inputs that the agent has not seen; its output is a file `.checks/NAME` then.
    """

    say: str
    solve: tuple[str, ...]
    checks: tuple[Check, ...]
    files: Mapping[str, str | bytes] = dataclasses.field(default_factory=dict)
    modes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    setup: str = ""
    collect: Mapping[str, str] = dataclasses.field(default_factory=dict)


MakeStep = Callable[[Draw], Step]


def text_of(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def holds(name: str, content: str) -> Check:
    """That a file has exactly this content, but for space at its end."""
    return f"{name} has the right content", f"text({name!r}) == {content.rstrip()!r}"


def one_line(name: str) -> Check:
    """That a file has one line: half the way to the right one."""
    return f"{name} has one line", f"len(lines({name!r})) == 1"


def made(name: str) -> Check:
    return f"{name} is there", f"is_file({name!r})"
