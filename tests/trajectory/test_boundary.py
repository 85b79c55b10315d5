"""The four rules: the field's cases, then random conversations against a slow oracle."""

import functools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from t1jax.trajectory import boundary
from t1jax.trajectory.record import Finish, RouteShape, Rule
from t1jax.trajectory.recorder import Recorder

from .made import ENDING

NO_ROUTES = RouteShape(layers=0, chosen=0, experts=0)

# A toy language in which texts have several encodings: 1..3 are a, b, c; 4 is "ab", 5 is "bc",
# 6 "abc"; 7 begins a message and 8, 9 end one.
SPELLING = {1: "a", 2: "b", 3: "c", 4: "ab", 5: "bc", 6: "abc", 7: "[", 8: "]", 9: "}"}


class Toy:
    start = 7
    ends = frozenset((8, 9))

    def same_text(self, sampled, copy):
        return spell(sampled) == spell(copy)


def spell(ids) -> str:
    return "".join(SPELLING[int(i)] for i in ids)


TOY = Toy()


def met(ids, mask, prompt, language=TOY):
    rule, keep, append = boundary.meet(
        np.array(ids), np.array(mask, bool), np.array(prompt), language
    )
    return rule, keep, append.tolist()


def record(steps, language=TOY):
    """Chunks after a client's steps, each a prompt and a completion."""
    recorder = Recorder(NO_ROUTES)
    for prompt, completion in steps:
        recorder.follow(np.array(prompt), language)
        logprobs = np.full(len(completion), -1.0)
        recorder.append_sampled(np.array(completion), logprobs, version=0, finish=Finish.stop)
    return recorder.finish(ENDING)


def test_the_client_goes_back():
    """3, 4 train once, as sampled in the first chunk; 5 is context in one, sampled in the other."""
    trajectory = record([([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 2], [3, 4, 5, 6, 7])])
    first, second = trajectory.chunks
    assert first.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.mask.astype(int).tolist() == [0, 0, 1, 1, 0, 1]
    assert second.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert second.mask.astype(int).tolist() == [0, 0, 0, 0, 1, 0, 1]
    assert (second.logprobs == -second.mask.astype(np.float32)).all()
    assert trajectory.boundaries == {"strict": 1, "normalised": 0, "retokenised": 0, "split": 1}


def test_an_edited_message_begins_a_chunk_without_old_logprobs():
    """The harness edits message 2 at turn 5."""
    steps, prompt = [], [7, 1, 8]
    for _ in range(4):
        steps.append((list(prompt), [2, 8]))
        prompt += [2, 8, 7, 3, 8]
    edited = [*prompt[:6], 1, *prompt[7:]]
    trajectory = record([*steps, (edited, [1, 8])])
    first, second = trajectory.chunks
    assert first.sampled_tokens == 8
    assert second.ids.tolist() == [*edited, 1, 8]
    assert np.flatnonzero(second.mask).tolist() == [len(edited), len(edited) + 1]
    assert np.flatnonzero(second.logprobs).tolist() == [len(edited), len(edited) + 1]
    assert trajectory.boundaries == {"strict": 3, "normalised": 0, "retokenised": 0, "split": 1}


def test_a_noncanonical_split_keeps_the_sampled_ids():
    rule, keep, append = met([7, 1, 4, 3, 8], [0, 0, 1, 1, 1], [7, 1, 6, 8, 7, 2, 8])
    assert (rule, keep, append) == (Rule.retokenised, 5, [7, 2, 8])


def test_an_end_of_text_is_not_followed_by_a_second_end():
    rule, keep, append = met([7, 1, 2, 9], [0, 0, 1, 1], [7, 1, 2, 8, 7, 3, 8])
    assert (rule, keep, append) == (Rule.normalised, 4, [7, 3, 8])


def test_a_turn_cut_by_length_gets_its_end_as_context():
    rule, keep, append = met([7, 1, 4, 3], [0, 0, 1, 1], [7, 1, 6, 8, 7, 3, 8])
    assert (rule, keep, append) == (Rule.retokenised, 4, [8, 7, 3, 8])


def test_a_completion_may_lack_its_last_16_tokens_but_not_17():
    for missing, expected in ((16, Rule.normalised), (17, Rule.split)):
        sampled = [2] * 5 + [3] * (missing - 1) + [8]
        prompt = [7, 1, 8, 7, *[2] * 5, 8, 7, 1]
        rule, keep, append = met([7, 1, 8, 7, *sampled], [0] * 4 + [1] * len(sampled), prompt)
        assert rule is expected
        if rule is Rule.normalised:
            assert (keep, append) == (4 + len(sampled), [7, 1])


def test_96_tokens_of_context_may_be_dropped_but_not_97():
    for dropped, expected in ((96, Rule.normalised), (97, Rule.split)):
        ids, mask = [7, 1, 2, 8, 7, *[1] * dropped], [0, 0, 1, 1, 0] + [0] * dropped
        rule, keep, append = met(ids, mask, [7, 1, 2, 8, 7, 3, 8])
        assert rule is expected
        if rule is Rule.normalised:
            assert (keep, append) == (5, [3, 8])


def test_an_old_retokenised_turn_is_met_again_at_every_later_turn():
    first = [7, 1, 6, 8]  # the client's copy of [4, 3, 8] after [7, 1]
    trajectory = record(
        [([7, 1], [4, 3, 8]), ([*first, 7, 2, 8], [1, 8]), ([*first, 7, 2, 8, 1, 8, 7, 3], [2, 8])]
    )
    (chunk,) = trajectory.chunks
    assert chunk.ids.tolist() == [7, 1, 4, 3, 8, 7, 2, 8, 1, 8, 7, 3, 2, 8]
    assert np.flatnonzero(chunk.mask).tolist() == [2, 3, 4, 8, 9, 12, 13]
    assert trajectory.boundaries == {"strict": 0, "normalised": 0, "retokenised": 2, "split": 0}


# ---- the oracle ---------------------------------------------------------------------------------


def oracle(ids, mask, prompt, language=TOY):
    """Every way to walk through the stream and the prompt at once; the least damage wins.

    Lists, recursion and no early exit; what a turn is, it finds out token by token.
    """
    ids, mask, prompt = list(map(int, ids)), list(map(bool, mask)), list(map(int, prompt))
    if prompt[: len(ids)] == ids:
        return Rule.strict, ids + prompt[len(ids) :]
    order = list(Rule)

    @functools.lru_cache(None)
    def best(i, j):
        """(damage, where the stream is cut, what is appended) for ids[i:] against prompt[j:]."""
        if not any(mask[i:]):
            shared = 0
            while i + shared < len(ids) and j + shared < len(prompt):
                if ids[i + shared] != prompt[j + shared]:
                    break
                shared += 1
            dropped = len(ids) - i - shared
            if dropped > 96:
                return None
            damage = order.index(Rule.normalised if dropped else Rule.strict)
            return damage, i + shared, tuple(prompt[j + shared :])
        sampled = next(k for k in range(i, len(ids)) if mask[k])
        end = next((k for k in range(sampled, len(ids)) if not mask[k]), len(ids))
        header = max([k for k in range(i, sampled) if ids[k] == language.start], default=sampled)
        if prompt[j : j + header - i] != ids[i:header]:
            return None
        j += header - i
        ended = ids[end - 1] in language.ends
        ways = []
        if prompt[j : j + end - header] == ids[header:end]:
            ways.append((Rule.strict, j + end - header))
        for cut in range(1, min(16, end - sampled) + 1):
            kept = end - header - cut
            is_end = j + kept < len(prompt) and prompt[j + kept] in language.ends
            if prompt[j : j + kept] == ids[header : header + kept] and is_end:
                ways.append((Rule.normalised, j + kept + ended))
        stops = [k for k in range(j, len(prompt)) if prompt[k] in language.ends]
        body = ids[header : end - ended]
        if stops and language.same_text(body, prompt[j : stops[0]]):
            ways.append((Rule.retokenised, stops[0] + ended))
        found = []
        for rule, after in ways:
            rest = best(end, after)
            if rest is not None:
                found.append((max(order.index(rule), rest[0]), *rest[1:]))
        return min(found, default=None)

    answer = best(0, 0)
    if answer is None:
        return Rule.split, prompt
    damage, keep, append = answer
    return order[damage], ids[:keep] + list(append)


def conversation(random) -> tuple[list[int], list[bool], list[int]]:
    """A stream of messages and what a client might make of it."""
    ids, mask, prompt = [], [], []
    letters = lambda n: [int(i) for i in random.integers(1, 7, n)]  # noqa: E731
    for _ in range(random.integers(1, 4)):
        given = [7, *letters(random.integers(0, 4)), 8]
        header = [7, *letters(random.integers(0, 2))] if random.random() < 0.8 else []
        sampled = letters(random.integers(1, 22))
        if random.random() < 0.8:
            sampled.append(8 if random.random() < 0.8 else 9)
        ids += given + header + sampled
        mask += [False] * len(given + header) + [True] * len(sampled)
        prompt += given + header + _handed_back(random, sampled)
    tail = (
        letters(random.integers(0, 3))
        if random.random() < 0.7
        else letters(random.integers(90, 105))
    )
    ids, mask = ids + tail, mask + [False] * len(tail)
    shared = tail[: random.integers(0, len(tail) + 1)] if random.random() < 0.5 else tail
    prompt += [*shared, *letters(random.integers(0, 4))]
    if random.random() < 0.15:
        prompt[random.integers(len(prompt))] = int(random.integers(1, 10))
    if random.random() < 0.1:
        prompt = prompt[: random.integers(len(prompt))]
    return ids, mask, prompt


def _handed_back(random, sampled: list[int]) -> list[int]:
    """A completion as a client gives it back: as it was, re-encoded, cut, or changed."""
    ended = sampled[-1] in Toy.ends
    body = sampled[:-1] if ended else list(sampled)
    way = random.random()
    if way < 0.4:
        return sampled
    if way < 0.65:
        text, body = spell(body), []
        while text:
            piece = next(
                p for p in random.permutation([6, 5, 4, 3, 2, 1]) if text.startswith(SPELLING[p])
            )
            body.append(int(piece))
            text = text[len(SPELLING[piece]) :]
    elif way < 0.85:
        body = body[: max(len(body) - random.integers(0, 19), 0)]
    else:
        body = [*body, int(random.integers(1, 7))]
    return [*body, 8]


def test_ten_thousand_conversations_meet_as_the_oracle_says():
    random = np.random.default_rng(0)
    seen = dict.fromkeys(Rule, 0)
    for number in range(10_000):
        ids, mask, prompt = conversation(random)
        rule, keep, append = met(ids, mask, prompt)
        stream = [] if rule is Rule.split else ids[:keep]
        assert (rule, stream + append) == oracle(ids, mask, prompt), (number, ids, mask, prompt)
        assert rule is Rule.split or all(i < keep for i in np.flatnonzero(mask))
        seen[rule] += 1
    assert min(seen[rule] for rule in Rule if rule is not Rule.opening) > 500, seen


# ---- with the published vocabulary --------------------------------------------------------------

sampled_text = st.lists(
    st.sampled_from([" inter", "national", "\n", " ", "🙂", "é", "<think>", "</think>\n\n",
                     "<|im_start|>", "ls -l", "<tool_call>\n<function=bash>\n</function>\n",
                     "</tool_call>", "中文", "x"]), min_size=1, max_size=8,
)  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    turns=st.lists(
        st.tuples(sampled_text, st.integers(0, 3), st.sampled_from(["stop", "text", "length"]),
                  st.sampled_from(["tool <|im_end|>\n", "\0\x1b[1m", "", "user"])),
        min_size=1, max_size=4,
    ),
    whole=st.booleans(),
)  # fmt: skip
def test_sampled_ids_are_trained_ids(chat, turns, whole):
    """Odd splits, half characters, missing ends; natively, or through a client that sends text."""
    recorder, spoken = Recorder(NO_ROUTES), []
    messages = [{"role": "user", "content": "task"}]
    recorder.append_context(chat.opening(messages))
    for parts, cut, ending, answer in turns:
        # Piece by piece: a split that encoding the whole text would not give.
        pieces = [chat.tokenizer.encode(part, add_special_tokens=False).ids for part in parts]
        sampled = [i for piece in pieces for i in piece]
        sampled = sampled[: max(len(sampled) - cut, 1)]
        end = {"stop": chat.tokenizer.token_to_id("<|im_end|>"), "length": None,
               "text": chat.tokenizer.token_to_id("<|endoftext|>")}[ending]  # fmt: skip
        completion = np.array(sampled if end is None else [*sampled, end])
        finish = Finish.length if end is None else Finish.stop
        logprobs = np.full(len(completion), -0.5)
        recorder.append_sampled(completion, logprobs, version=0, finish=finish)
        spoken += completion.tolist()
        # A client keeps the text after the header, as one message; ours reads it back.
        messages.append({"role": "assistant", "raw": chat.decode(chat.without_end(completion))})
        messages.append({"role": "user", "content": answer})
        if whole:
            recorder.follow(_as_a_client_renders(chat, messages), chat)
        else:
            recorder.append_context(chat.following(messages[-1:], last=completion[-1]))
    trajectory = recorder.finish(ENDING)
    (chunk,) = trajectory.chunks
    assert chunk.ids[chunk.mask].tolist() == spoken
    assert trajectory.boundaries["split"] == 0
    if not whole:
        assert len(turns) - 1 == trajectory.boundaries["strict"]
    ends = np.flatnonzero(np.isin(chunk.ids, list(chat.ends)))
    assert (np.diff(ends) > 1).all()  # never two ends in a row
    given_ids = chunk.ids[~chunk.mask]
    assert not np.isin(given_ids, chat.encode_text("\ufffd")).any()


def _as_a_client_renders(chat, messages):
    """What a server makes of an assistant's text: plain text after the header it was sampled at."""
    ids = [chat.opening(messages[:1])]
    for message in messages[1:]:
        if "raw" in message:
            ids.append(chat.encode_text(message["raw"]))
            last = 0
        else:
            ids.append(chat.following([message], last=last))
    return np.concatenate(ids)
