"""Where a generated task's parameters come from: seeded, and never the same in two splits.

Names are pairs of words (`red_fox`) and numbers are whole. Each name and each number belongs to
one split, by arithmetic and not by chance, so that splits made with different seeds share none
either; the words themselves occur in all of them, so that a model that was trained on one split
can read the others.
"""

import functools
import random
from enum import StrEnum

FIRST = (
    *("red", "blue", "green", "gold", "gray", "pink", "dark", "pale"),
    *("warm", "cold", "soft", "hard", "long", "flat", "wide", "slim"),
    *("calm", "wild", "fast", "slow", "loud", "mild", "kind", "bold"),
    *("old", "new", "raw", "dry", "wet", "shy", "big", "odd"),
    *("thin", "deep", "high", "low", "rich", "poor", "tall", "tiny"),
)
SECOND = (
    *("fox", "owl", "cat", "dog", "bee", "ant", "elk", "hen"),
    *("lake", "hill", "rock", "wood", "lamp", "door", "bell", "drum"),
    *("ship", "boat", "star", "moon", "rain", "snow", "wind", "leaf"),
    *("rose", "tree", "seed", "corn", "salt", "milk", "cake", "soup"),
    *("road", "gate", "wall", "roof", "hat", "shoe", "coat", "ring"),
)
# Content of files: shared by all splits, since it is no parameter.
WORDS = (
    *("alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "lambda"),
    *("north", "south", "east", "west", "spring", "summer", "autumn", "winter"),
)
SHARES = 10  # of which train has eight, validation and test one each


class Split(StrEnum):
    """Which part of the tasks; the value is the folder's name."""

    train = "train"
    validation = "validation"
    test = "test"


def split_of_share(share: int) -> Split:
    return {8: Split.validation, 9: Split.test}.get(share % SHARES, Split.train)


def split_of_name(name: str) -> Split:
    """The split of `red_fox`: every word is part of names of every split."""
    first, second = name.split("_")
    return split_of_share(FIRST.index(first) + 3 * SECOND.index(second))


def split_of_number(number: int) -> Split:
    """The split of a number, scattered so that no digit gives it away."""
    return split_of_share(number * 2654435761 % 2**32 >> 12)


@functools.cache
def numbers_of(split: Split, low: int, high: int) -> tuple[int, ...]:
    return tuple(n for n in range(low, high + 1) if split_of_number(n) == split)


@functools.cache
def names_of(split: Split) -> tuple[str, ...]:
    names = (f"{first}_{second}" for first in FIRST for second in SECOND)
    return tuple(name for name in names if split_of_name(name) == split)


class Draw:
    """The parameters of one task, kept in `names` and `numbers`."""

    def __init__(self, rng: random.Random, split: Split):
        self.rng = rng
        self.names: list[str] = []
        self.numbers: list[int] = []
        self._names = rng.sample(names_of(split), len(names_of(split)))
        self._split = split

    def name(self) -> str:
        """A name such as `red_fox`, used nowhere else in this task."""
        self.names.append(self._names.pop())
        return self.names[-1]

    def number(self, low: int = 100, high: int = 999) -> int:
        """A number of this split; one that this task has not used, as long as there are some."""
        mine = numbers_of(self._split, low, high)
        number = self.rng.choice([n for n in mine if n not in self.numbers] or mine)
        self.numbers.append(number)
        return number

    def word(self) -> str:
        return self.rng.choice(WORDS)

    def items(self, count: int) -> list[str]:
        """Different words of content, such as `beta3`, in random order."""
        found = [f"{self.word()}{index}" for index in range(count)]
        self.rng.shuffle(found)
        return found

    def lines(self, count: int, words: int = 2) -> list[str]:
        """Lines of content."""
        return [" ".join(self.word() for _ in range(words)) for _ in range(count)]

    def mixed(self, special: list[str], plain: list[str]) -> list[str]:
        """Both kinds of lines in one random order."""
        both = [*special, *plain]
        self.rng.shuffle(both)
        return both
