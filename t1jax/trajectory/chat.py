"""Messages to token ids and back, in Qwen3.5's form: append-only, and safe from what text says.

Structure (`<|im_start|>`, `<think>`, `<tool_response>` …) is placed by id; text from people, tools
and sandboxes is encoded as plain text, so that no special id ever comes from it. Rendered like the
published template wherever that only appends; the published one drops the reasoning of turns before
the last user message, which a stream of sampled tokens cannot.

Text goes through the tokenizer's normalizer (NFC): a decomposed accent comes back composed.
Not covered: images, video. Knows nothing of log-probs or of files but tokenizer.json.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from t1jax.errors import UserError
from t1jax.trajectory import markup
from t1jax.trajectory.markup import ParsedTurn

START, END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
RESPONSE, END_RESPONSE = "<tool_response>", "</tool_response>"
MARKS = (START, END, END_OF_TEXT, THINK, END_THINK, CALL, END_CALL, RESPONSE, END_RESPONSE)
# What the policy itself writes: in its own text, and in our instructions, these are tokens.
POLICY_MARKS = re.compile("|".join(map(re.escape, (THINK, END_THINK, CALL, END_CALL))))

TOOLS_BEFORE = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
TOOLS_AFTER = """
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must \
be nested within <tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the \
function call, but NOT after
- If there is no function call available, answer the question like normal with your current \
knowledge and do not tell the user about function calls
</IMPORTANT>"""

Message = Mapping[str, Any]  # as in the OpenAI chat API: role, content, tool_calls …


class Mark(str):
    """A piece of structure: one token, by its content."""

    __slots__ = ()


Piece = str  # a Mark, or plain text


@dataclasses.dataclass(frozen=True, eq=False)
class Rendered:
    """A conversation as ids; mask says which of them the policy wrote."""

    ids: np.ndarray
    mask: np.ndarray


class Chat:
    """Reads and writes conversations with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        # The same model and rules without added tokens: nothing in a text can name one.
        self._plain = Tokenizer(tokenizer.model)
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            setattr(self._plain, part, getattr(tokenizer, part))
        added = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items()}
        missing = [mark for mark in MARKS if mark not in added]
        if missing:
            raise UserError(
                f"the tokenizer has no token {missing[0]}; expected one of the Qwen3.5 family, "
                "with the tokens of its chat template"
            )
        self._marks = {mark: added[mark] for mark in MARKS}
        self.added_ids = frozenset(added.values())

    @classmethod
    def load(cls, path: str | Path) -> "Chat":
        """From a checkpoint directory, or its tokenizer.json."""
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"{file} does not exist; expected a checkpoint with its tokenizer.json")
        return cls(Tokenizer.from_file(str(file)))

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end a message; the engine's stop tokens."""
        return frozenset((self._marks[END], self._marks[END_OF_TEXT]))

    @property
    def start(self) -> int:
        """The token that begins a message."""
        return self._marks[START]

    # ---- text -----------------------------------------------------------------------------------

    def encode_text(self, text: str) -> np.ndarray:
        """Plain text as ids [N] int32: no special id, whatever it says. Lone surrogates: U+FFFD."""
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return np.array(self._plain.encode(clean, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of ids, special tokens spelled out; U+FFFD where bytes are no UTF-8."""
        return self.tokenizer.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=False)

    def encode(self, pieces: Iterable[Piece]) -> np.ndarray:
        """Structure by id, and the text between as one stretch each."""
        ids: list[np.ndarray] = []
        text: list[str] = []
        for piece in [*pieces, None]:
            if piece is None or isinstance(piece, Mark):
                if text:
                    ids.append(self.encode_text("".join(text)))
                    text = []
                if piece is not None:
                    ids.append(np.array([self._marks[piece]], np.int32))
            else:
                text.append(piece)
        return np.concatenate(ids) if ids else np.zeros(0, np.int32)

    # ---- a stream that only grows ---------------------------------------------------------------

    def opening(
        self, messages: Sequence[Message], *, tools: Sequence[Any] = (), thinking: bool = True
    ) -> np.ndarray:
        """The first prompt, up to where the policy begins to write.

        Raises:
          UserError: no message, one in a place or of a form that the template has no words for.
        """
        return self.render(messages, tools=tools, thinking=thinking, prompt=True).ids

    def following(
        self, messages: Sequence[Message], *, last: int, thinking: bool = True
    ) -> np.ndarray:
        """What follows a completion: its end if it was cut, the messages, the next header.

        Args:
          messages: tool results and user messages.
          last: the completion's last id. An end token, whichever, is not repeated.
          thinking: whether the policy is to reason first.
        """
        for message in messages:
            if message.get("role") not in ("tool", "user"):
                raise UserError(
                    f"a message of role {message.get('role')!r} cannot follow a completion; "
                    "expected tool or user"
                )
        end: list[Piece] = [] if last in self.ends else [Mark(END)]
        body = (piece for _, piece in _messages(messages, "assistant", thinking))
        return self.encode([*end, "\n", *body, *_header(thinking)])

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        thinking: bool = True,
        prompt: bool = False,
    ) -> Rendered:
        """A whole conversation, assistant messages as the policy would have written them.

        Args:
          messages: system first if at all; at least one user message.
          tools: JSON schemas, in the OpenAI form.
          thinking: False closes the reasoning block in the header of messages without reasoning.
          prompt: end with the header of the next assistant message.
        """
        pieces = list(_conversation(messages, tools, thinking))
        if prompt:
            pieces += [(False, piece) for piece in _header(thinking)]
        parts = [
            (written, self.encode(piece for _, piece in run)) for written, run in _runs(pieces)
        ]
        mask = [np.full(len(ids), written) for written, ids in parts]
        return Rendered(np.concatenate([ids for _, ids in parts]), np.concatenate(mask))

    # ---- reading what was sampled ---------------------------------------------------------------

    def parse(self, sampled: np.ndarray, *, thinking: bool = True) -> ParsedTurn:
        """Reasoning, words and tool calls of a completion. Its ids are only read."""
        return markup.parse(self.decode(self.without_end(sampled)), thinking=thinking)

    def without_end(self, ids: np.ndarray) -> np.ndarray:
        """A completion less its end token, if it has one."""
        return ids[:-1] if len(ids) and int(ids[-1]) in self.ends else ids

    def same_text(self, sampled: np.ndarray, copy: np.ndarray) -> bool:
        """Whether two encodings say the same, up to what the template does to white space."""
        ours, theirs = self.decode(sampled), self.decode(copy)
        return ours == theirs or _normal(ours) == _normal(theirs)

    def messages_of(self, ids: np.ndarray) -> list[tuple[str, str]]:
        """(role, text) of each message of a stream, told apart by id: text cannot forge one.

        Tool results are messages of their own, of role tool. A header without a message is one of
        the assistant.
        """
        starts = np.flatnonzero(ids == self.start).tolist()
        found: list[tuple[str, str]] = []
        for begin, end in itertools.pairwise([*starts, len(ids)]):
            body = ids[begin + 1 : end]
            ends = np.flatnonzero(np.isin(body, list(self.ends)))
            body = body[: ends[0]] if len(ends) else body
            results = self._results(body)
            role, _, text = self.decode(body).partition("\n")
            found += [("tool", result) for result in results] or [(role, text)]
        return found

    def _results(self, body: np.ndarray) -> list[str]:
        """The texts between the marks of tool results."""
        edges = [np.flatnonzero(body == self._marks[mark]) for mark in (RESPONSE, END_RESPONSE)]
        pairs = zip(*(edge.tolist() for edge in edges), strict=False)
        texts = [self.decode(body[begin + 1 : end]) for begin, end in pairs]
        return [text.removeprefix("\n").removesuffix("\n") for text in texts]


def _normal(text: str) -> ParsedTurn:
    """A message's meaning: the same for all ways to lay it out."""
    text = text.removeprefix(START).removeprefix("assistant\n")
    if text.startswith(THINK):
        return markup.parse(text.removeprefix(THINK), thinking=True)
    return markup.parse(text, thinking=False)


# ---- the template -------------------------------------------------------------------------------

Written = tuple[bool, Piece]  # whether the policy wrote it


def _runs(pieces: Sequence[Written]) -> Iterator[tuple[bool, list[Written]]]:
    """Neighbouring pieces by who wrote them: the policy's are tokens of their own."""
    run: list[Written] = []
    for piece in pieces:
        if run and run[-1][0] != piece[0]:
            yield run[-1][0], run
            run = []
        run.append(piece)
    if run:
        yield run[-1][0], run


def _header(thinking: bool) -> list[Piece]:
    think = [Mark(THINK), "\n"] if thinking else [Mark(THINK), "\n\n", Mark(END_THINK), "\n\n"]
    return [Mark(START), "assistant\n", *think]


def _given(*pieces: Piece) -> Iterator[Written]:
    return ((False, piece) for piece in pieces)


def _conversation(
    messages: Sequence[Message], tools: Sequence[Any], thinking: bool
) -> Iterator[Written]:
    if not any(message.get("role") == "user" for message in messages):
        raise UserError(f"a conversation of {len(messages)} messages has no user message; the "
                        "template needs one")  # fmt: skip
    system = text_of(messages[0], 0).strip() if messages[0].get("role") == "system" else None
    if tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        instructions = _marked(TOOLS_AFTER)
        yield from _given(Mark(START), "system\n", TOOLS_BEFORE, listed, *instructions)
        yield from _given("\n\n" + system if system else "", Mark(END), "\n")
    elif system is not None:
        yield from _given(Mark(START), "system\n", system, Mark(END), "\n")
    yield from _messages(messages[system is not None :], "system", thinking)


def _messages(messages: Sequence[Message], before: str, thinking: bool) -> Iterator[Written]:
    """Every message but the system's. Neighbouring tool results share one user message."""
    for number, message in enumerate(messages):
        role, content = message.get("role"), text_of(message, number).strip()
        after = messages[number + 1].get("role") if number + 1 < len(messages) else None
        if role == "user":
            yield from _given(Mark(START), "user\n", content, Mark(END), "\n")
        elif role == "tool":
            if before not in ("tool", "assistant"):
                raise UserError(f"message {number} is a tool's and follows the {before}'s; "
                                "expected it after an assistant's")  # fmt: skip
            yield from _given(*([] if before == "tool" else [Mark(START), "user"]))
            yield from _given("\n", Mark(RESPONSE), "\n" + content + "\n", Mark(END_RESPONSE))
            yield from _given(*([] if after == "tool" else [Mark(END), "\n"]))
        elif role == "assistant":
            yield from _assistant(message, content, number, thinking)
        else:
            raise UserError(f"message {number} has role {role!r}; expected user, assistant or "
                            "tool, and one of the system at the very beginning")  # fmt: skip
        before = str(role)


def _assistant(message: Message, content: str, number: int, thinking: bool) -> Iterator[Written]:
    reasoning, content = _reasoning(message, content)
    closed = not thinking and not reasoning
    yield from _given(*_header(not closed))
    own = [] if closed else [reasoning, "\n", Mark(END_THINK), "\n\n"]
    own += [content, *_calls(message, content, number)]
    for text in own:
        yield from ((True, piece) for piece in _marked(text))
    yield True, Mark(END)
    yield False, "\n"


def _reasoning(message: Message, content: str) -> tuple[str, str]:
    """A message's reasoning and words; reasoning may stand in the content, in its tags."""
    given = message.get("reasoning_content")
    if isinstance(given, str):
        return given.strip(), content
    if END_THINK not in content:
        return "", content
    before, _, _ = content.partition(END_THINK)
    reasoning = before.rstrip("\n").split(THINK)[-1].lstrip("\n")
    return reasoning.strip(), content.split(END_THINK)[-1].lstrip("\n")


def _calls(message: Message, content: str, number: int) -> Iterator[Piece]:
    for position, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function", call)
        yield "\n" if position else "\n\n" if content.strip() else ""
        yield Mark(CALL)
        yield f"\n<function={function['name']}>\n"
        for name, value in _arguments(function, number).items():
            structured = isinstance(value, Mapping | list | tuple)
            text = json.dumps(value, ensure_ascii=False) if structured else str(value)
            yield f"<parameter={name}>\n{text}\n</parameter>\n"
        yield "</function>\n"
        yield Mark(END_CALL)


def _arguments(function: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """A call's arguments: a mapping, or JSON text of one, as the OpenAI API has it."""
    arguments = function.get("arguments") or {}
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        parsed = None
    if not isinstance(parsed, Mapping):
        raise UserError(
            f"message {number} calls {function['name']} with arguments {arguments!r:.80}; expected "
            "a JSON object"
        )
    return parsed


def _marked(text: Piece) -> Iterator[Piece]:
    """Text of the policy or of ours, its marks as tokens."""
    if isinstance(text, Mark):
        yield text
        return
    at = 0
    for mark in POLICY_MARKS.finditer(text):
        yield text[at : mark.start()]
        yield Mark(mark[0])
        at = mark.end()
    yield text[at:]


def text_of(message: Message, number: int) -> str:
    """A message's content as text; parts of text are joined, anything else is refused."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, Mapping) and "text" in p for p in content):
        return "".join(str(part["text"]) for part in content)
    raise UserError(f"message {number} has content that is not text; images and video are not "
                    "supported")  # fmt: skip
