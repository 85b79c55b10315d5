"""A stream whose text is encoded again: which columns stay, which tokens are lost, and the sums."""

import numpy as np
import pytest

from t1jax.trajectory.record import Ending, Finish, RouteShape
from t1jax.trajectory.recorder import Recorder
from t1jax.trajectory.retokenise import retokenise

from . import made

SHAPE = RouteShape(layers=2, chosen=2, experts=16)


def split_up(chat, text):
    """A token of its own for each character: nothing that the tokenizer would choose."""
    return np.concatenate([chat.encode_text(character) for character in text])


def recorded(chat, context, sampled, *, after=None):
    """One turn; log-probs are -1/8, -2/8, ..., routes tell tokens apart."""
    recorder = Recorder(SHAPE)
    recorder.append_context(context)
    logprobs = -np.arange(1, len(sampled) + 1) / 8
    recorder.append_sampled(sampled, logprobs, version=3, finish=Finish.stop)
    if after is not None:
        recorder.append_context(after)
    recorder.record_routes(0, made.rows(0, len(recorder) - 1, SHAPE))
    ending = Ending(task="demo", outcome="partial", reward=0.5)
    return recorder.finish(ending).chunks[0]


@pytest.fixture(scope="module")
def opening(tiny_chat):
    return tiny_chat.opening([{"role": "user", "content": "Say it."}], thinking=False)


def test_a_stream_in_the_tokenizers_own_split_comes_back_as_it_is(tiny_chat, opening):
    end = [i for i in tiny_chat.ends if tiny_chat.decode([i]) == "<|im_end|>"]
    sampled = np.concatenate([tiny_chat.encode_text("the answer"), end]).astype(np.int32)
    chunk = recorded(tiny_chat, opening, sampled, after=tiny_chat.encode_text("\n"))
    found = retokenise(chunk, tiny_chat)
    assert (found.changed, found.lost) == (0, 0)
    np.testing.assert_array_equal(found.stands_for, chunk.mask)
    for name in ("ids", "mask", "logprobs", "versions", "routes", "recorded"):
        np.testing.assert_array_equal(getattr(found.chunk, name), getattr(chunk, name), name)
    assert found.chunk.turns == chunk.turns


def test_a_changed_stretch_keeps_its_sum_and_what_surrounds_it_keeps_its_columns(
    tiny_chat, opening
):
    words = [tiny_chat.encode_text(text) for text in ("go", " file", " file")]
    odd = split_up(tiny_chat, " file")
    assert len(odd) > len(words[1]) >= 1
    sampled = np.concatenate([words[0], odd, words[2]]).astype(np.int32)
    chunk = recorded(tiny_chat, opening, sampled)
    found = retokenise(chunk, tiny_chat)
    at, n, m = len(opening) + len(words[0]), len(odd), len(words[1])
    np.testing.assert_array_equal(found.chunk.ids, np.concatenate([opening, *words]))
    assert (found.changed, found.lost) == (n, 0)
    assert found.chunk.sampled_tokens == len(sampled) - n + m
    np.testing.assert_allclose(
        found.chunk.logprobs[at : at + m].sum(), chunk.logprobs[at : at + n].sum(), rtol=1e-6
    )
    np.testing.assert_array_equal(found.stands_for[at : at + m], [n] + [0] * (m - 1))
    np.testing.assert_array_equal(found.chunk.logprobs[at + m :], chunk.logprobs[at + n :])
    np.testing.assert_array_equal(found.chunk.routes[at + m :], chunk.routes[at + n :])
    np.testing.assert_array_equal(found.chunk.routes[:at], chunk.routes[:at])
    assert not found.chunk.recorded[at : at + m].any() and found.chunk.recorded[:at].all()
    (turn,) = found.chunk.turns
    assert (turn.sampled, turn.end) == (len(opening), len(found.chunk))


def test_a_token_over_the_edge_of_a_turn_is_given_and_its_sampled_part_is_lost(tiny_chat):
    """The header's last words and what was sampled become one token, as in a client's text."""
    whole = tiny_chat.encode_text(" file")
    assert len(whole) == 1
    letters = split_up(tiny_chat, " file")
    chunk = recorded(tiny_chat, letters[:2], letters[2:])
    found = retokenise(chunk, tiny_chat)
    np.testing.assert_array_equal(found.chunk.ids, whole)
    assert (found.changed, found.lost) == (len(letters) - 2, len(letters) - 2)
    assert not found.chunk.mask.any()


def test_bytes_that_are_no_text_change_and_the_rest_stays(tiny_chat, opening):
    """Half an emoji decodes to U+FFFD, which is other bytes."""
    half = tiny_chat.encode_text("🙂")[:1]
    before, after = tiny_chat.encode_text("go"), tiny_chat.encode_text(" file")
    chunk = recorded(tiny_chat, opening, np.concatenate([before, half, after]))
    found = retokenise(chunk, tiny_chat)
    assert (found.changed, found.lost) == (1, 0)
    assert tiny_chat.decode(found.chunk.ids) == tiny_chat.decode(chunk.ids)
    np.testing.assert_array_equal(found.chunk.ids[-len(after) :], after)
    np.testing.assert_array_equal(
        found.chunk.logprobs[-len(after) :], chunk.logprobs[-len(after) :]
    )
