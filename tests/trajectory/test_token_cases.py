"""Faults of token streams that users of such systems reported, with the published vocabulary."""

import numpy as np
import pytest

from t1jax.trajectory.record import Finish, RouteShape, Rule
from t1jax.trajectory.recorder import Recorder

from .made import ENDING

NO_ROUTES = RouteShape(layers=0, chosen=0, experts=0)
USER = {"role": "user", "content": "Go on"}


def ids_of(chat, *pieces) -> np.ndarray:
    """Encoded piece by piece, special tokens by name."""
    encoded = [chat.tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces]
    return np.concatenate(encoded).astype(np.int32)


def after(chat, completion, *, whole):
    """The chunk after a completion and a user's answer: natively, or through a client's copy."""
    recorder = Recorder(NO_ROUTES)
    opening = chat.opening([USER])
    recorder.append_context(opening)
    logprobs = np.full(len(completion), -0.5)
    recorder.append_sampled(completion, logprobs, version=0, finish=Finish.stop)
    if whole:
        text = chat.decode(chat.without_end(completion))
        copy = chat.encode_text(text)
        recorder.follow(np.concatenate([opening, copy, chat.following([USER], last=0)]), chat)
    else:
        recorder.append_context(chat.following([USER], last=int(completion[-1])))
    (chunk,) = recorder.finish(ENDING).chunks
    begin = len(opening)
    np.testing.assert_array_equal(chunk.ids[begin : begin + len(completion)], completion)
    assert np.flatnonzero(chunk.mask).tolist() == list(range(begin, begin + len(completion)))
    return chat.decode(chunk.ids[begin + len(completion) :]), chunk


both = pytest.mark.parametrize("whole", [False, True], ids=["native", "whole conversation"])
NEXT = "\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n<think>\n"


@both
def test_a_noncanonical_split_is_trained_as_sampled(chat, whole):
    completion = ids_of(chat, " inter", "national", "</think>", "<|im_end|>")
    assert len(ids_of(chat, " international")) == 1
    assert len(completion) == 4
    assert after(chat, completion, whole=whole)[0] == NEXT


@both
def test_a_character_cut_in_the_middle_stays_cut(chat, whole):
    """Decoding shows U+FFFD; its own encoding must not take the place of the bytes."""
    emoji = ids_of(chat, "🫨")
    assert len(emoji) > 1
    completion = np.append(ids_of(chat, "done "), emoji[0])
    assert chat.decode(completion).endswith("\ufffd")
    given, chunk = after(chat, completion, whole=whole)
    assert given == "<|im_end|>" + NEXT
    assert not np.isin(chunk.ids, chat.encode_text("\ufffd")).any()


@both
def test_an_end_of_text_ends_the_turn(chat, whole):
    completion = ids_of(chat, "bye</think>", "<|endoftext|>")
    assert after(chat, completion, whole=whole)[0] == NEXT


@both
def test_a_start_in_the_middle_of_a_turn_is_kept(chat, whole):
    completion = ids_of(chat, "a</think>b", "<|im_start|>", "user\nc", "<|im_end|>")
    given, chunk = after(chat, completion, whole=whole)
    assert given == NEXT
    assert int((chunk.ids == chat.start).sum()) == 5


@both
def test_a_turn_cut_by_length_has_no_sampled_end(chat, whole):
    completion = ids_of(chat, "I was about to")
    given, chunk = after(chat, completion, whole=whole)
    assert given == "<|im_end|>" + NEXT
    assert not np.isin(chunk.ids[chunk.mask], list(chat.ends)).any()


def test_the_template_dropping_old_reasoning_is_a_split(chat):
    """What the published template does when a second user message comes."""
    recorder = Recorder(NO_ROUTES)
    opening = chat.opening([USER])
    assert recorder.follow(opening, chat) is Rule.opening
    completion = ids_of(chat, "thoughts\n</think>\n\nanswer<|im_end|>")
    logprobs = np.full(len(completion), -0.5)
    recorder.append_sampled(completion, logprobs, version=0, finish=Finish.stop)
    header = ids_of(chat, "<|im_start|>", "assistant\n")
    bare = np.concatenate(
        [opening[: -len(ids_of(chat, "<think>\n")) - len(header)], header]
    )  # without <think>
    prompt = np.concatenate([bare, ids_of(chat, "answer"), chat.following([USER], last=0)])
    assert recorder.follow(prompt, chat) is Rule.split
    assert recorder.stream.tolist() == prompt.tolist()


@pytest.mark.parametrize(
    ("said", "copied"),
    [
        ("why\n</think>\n\nyes", "why\n</think>\n\nyes"),
        ("why</think>yes", "why\n</think>\n\nyes"),  # laid out anew by the template
        ("\n\nwhy \n</think>\n\n\nyes \n", "why\n</think>\n\nyes"),
        ("</think>\n\nyes", "\n</think>\n\nyes"),
        (
            "w</think>\n<tool_call>\n<function=bash>\n<parameter=command>ls</parameter>\n"
            "</function></tool_call>",
            "w\n</think>\n\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
    ],
)
def test_the_same_message_laid_out_anew_is_no_rewriting(chat, said, copied):
    recorder = Recorder(NO_ROUTES)
    opening = chat.opening([USER])
    recorder.append_context(opening)
    completion = ids_of(chat, said, "<|im_end|>")
    recorder.append_sampled(
        completion, np.full(len(completion), -0.5), version=0, finish=Finish.stop
    )
    prompt = ids_of(chat, chat.decode(opening) + copied + "<|im_end|>" + NEXT)
    assert recorder.follow(prompt, chat) in (Rule.strict, Rule.normalised, Rule.retokenised)
    expected = np.concatenate([opening, completion, ids_of(chat, NEXT)])
    assert recorder.stream.tolist() == expected.tolist()


@pytest.mark.parametrize("copied", ["why\n</think>\n\nno", "so\n</think>\n\nyes", "why"])
def test_another_text_is_rewriting(chat, copied):
    recorder = Recorder(NO_ROUTES)
    opening = chat.opening([USER])
    recorder.append_context(opening)
    completion = ids_of(chat, "why</think>yes<|im_end|>")
    recorder.append_sampled(
        completion, np.full(len(completion), -0.5), version=0, finish=Finish.stop
    )
    prompt = ids_of(chat, chat.decode(opening) + copied + " at all<|im_end|>" + NEXT)
    assert recorder.follow(prompt, chat) is Rule.split
