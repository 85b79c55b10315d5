"""The text of an assistant's turn, read: reasoning, words, tool calls, and what is wrong with them.

    …reasoning…</think>
    words
    <tool_call>
    <function=bash>
    <parameter=command>
    ls
    </parameter>
    </function>
    </tool_call>

Reads text only; token ids are somebody else's. A malformed call is an error to be shown to the
policy, never an exception: the episode goes on.
"""

import dataclasses
import re
from collections.abc import Iterator

# A value may hold any tag: it ends at the `</parameter>` that another parameter or the function's
# end follows, a call at the `</function>` that `</tool_call>` follows.
CALL = re.compile(r"<tool_call>\s*<function=([^>\n]*)>(.*?)</function>\s*</tool_call>", re.DOTALL)
PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]*)>(.*?)</parameter>(?=\s*<parameter=|\s*\Z)", re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call as written; values are text, without the line breaks that the form puts around."""

    name: str
    arguments: dict[str, str]


@dataclasses.dataclass(frozen=True)
class ParsedTurn:
    """What a turn says. `errors` are sentences for the policy."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    suffix: str = ""  # words after the last call, which the form forbids; harmless
    errors: tuple[str, ...] = ()


def parse(text: str, *, thinking: bool) -> ParsedTurn:
    """Reads a turn.

    Args:
      text: the completion, without its end token.
      thinking: whether the prompt opened `<think>`: then the text begins inside it.
    """
    reasoning, closed, rest = text.partition("</think>") if thinking else ("", "</think>", text)
    if not closed:
        return ParsedTurn(reasoning.strip(), "", errors=tuple(_unclosed(reasoning)))
    calls, errors, at, words = [], [], 0, []
    for match in CALL.finditer(rest):
        words.append(rest[at : match.start()])
        at = match.end()
        try:
            calls.append(_call(match[1], match[2]))
        except ValueError as error:
            errors.append(str(error))
    words.append(rest[at:])
    errors += _leftovers(words)
    content, *between = (part.strip() for part in words)
    suffix = "\n".join(part for part in between if part)
    return ParsedTurn(reasoning.strip(), content, tuple(calls), suffix, tuple(errors))


def _unclosed(reasoning: str) -> Iterator[str]:
    if "<tool_call>" in reasoning:
        yield "a tool call stands inside <think>: close it with </think>, then call"


def _leftovers(words: list[str]) -> Iterator[str]:
    """Openings of calls that no complete call took."""
    for part in words:
        if "<tool_call>" in part:
            yield (
                "a <tool_call> is incomplete: expected <tool_call>, <function=NAME>, "
                "<parameter=NAME>, value, </parameter>, </function>, </tool_call>, each on a line"
            )


def _call(name: str, body: str) -> ToolCall:
    if not name.strip():
        raise ValueError("a tool call names no function: write <function=NAME>")
    arguments: dict[str, str] = {}
    at = 0
    while body[at:].strip():
        match = PARAMETER.match(body, at)
        if match is None:
            raise ValueError(
                f"the call of {name.strip()} is malformed at {body[at:].strip()[:40]!r}: write "
                "<parameter=NAME>, value, </parameter>"
            )
        if match[1].strip() in arguments:
            raise ValueError(f"the call of {name.strip()} has parameter {match[1].strip()} twice")
        arguments[match[1].strip()] = match[2].removeprefix("\n").removesuffix("\n")
        at = match.end()
    return ToolCall(name.strip(), arguments)
