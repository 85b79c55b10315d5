"""A kept stream is used for a prompt that begins with exactly its tokens, and for no other."""

import numpy as np

from t1jax.sampling.prefix_cache import Entry, PrefixCache


def entry(tokens, session="a", size=10):
    return Entry(session=session, tokens=np.asarray(tokens), prefix=None, size_bytes=size)


def filled(*entries, limit=100):
    cache = PrefixCache(limit)
    for one in entries:
        cache.keep(one)
    return cache


def found(cache, session, prompt):
    hit = cache.find(session, np.asarray(prompt))
    return None if hit is None else hit.tokens.tolist()


def test_the_longest_exact_prefix_of_the_session_is_found():
    cache = filled(entry([1, 2, 9]), entry([1, 2]))
    assert found(cache, "a", [1, 2, 9, 4]) == [1, 2, 9]
    assert found(cache, "a", [1, 2, 3, 4]) == [1, 2]
    assert found(cache, "a", [1, 2]) == [1, 2]
    assert found(cache, "a", [1]) is None  # a recurrent state cannot be cropped
    assert found(cache, "a", [2, 2, 9]) is None
    assert found(cache, "b", [1, 2, 9, 4]) is None


def test_a_stream_takes_the_place_of_what_it_continues():
    cache = filled(entry([1, 2]), entry([1, 2, 3, 4]), entry([1, 7]))
    assert len(cache) == 2 and cache.size_bytes == 20
    assert found(cache, "a", [1, 2, 3]) is None


def test_the_least_recently_used_goes_first():
    cache = filled(entry([1], "a", 40), entry([1], "b", 40))
    assert found(cache, "a", [1, 2]) == [1]
    cache.keep(entry([1], "c", 40))
    assert [found(cache, name, [1]) for name in "abc"] == [[1], None, [1]]
    assert (cache.size_bytes, cache.evictions) == (80, 1)


def test_what_is_larger_than_the_budget_is_not_kept_at_all():
    cache = filled(entry([1], "a", 101))
    assert len(cache) == 0 and cache.size_bytes == 0


def test_nothing_is_left_of_a_session_or_of_old_weights():
    cache = filled(entry([1, 2]), entry([3]), entry([1], "b"))
    cache.forget("a")
    assert len(cache) == 1 and found(cache, "a", [3, 4]) is None
    cache.clear()
    assert (len(cache), cache.size_bytes, found(cache, "b", [1])) == (0, 0, None)
