"""`t1jax tasks make`: seeded tasks of every family and level, in splits that share no parameter."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from sandbox.tasks.compose import STEPS_OF_LEVEL, Draft, write
from sandbox.tasks.draw import Draw, Split
from sandbox.tasks.families import FAMILIES
from t1jax.errors import UserError

SHARES = {Split.train: 0.8, Split.validation: 0.1, Split.test: 0.1}
MOST_REDRAWS = 100


def make(
    out: str | Path,
    *,
    seed: int = 0,
    count: int,
    levels: tuple[int, ...] = tuple(STEPS_OF_LEVEL),
    families: tuple[str, ...] = tuple(FAMILIES),
    advance: Callable[[int], None] = lambda done: None,
) -> dict[Split, int]:
    """Writes OUT/train, OUT/validation and OUT/test, complete or not at all; returns the counts.

    Raises:
      UserError: OUT is there already, or a level or family is unknown.
    """
    out = Path(out)
    _refuse(out, count, levels, families)
    counts = split_counts(count)
    work = out.with_name(f"{out.name}.incomplete")
    if work.exists():
        shutil.rmtree(work)
    for split, drafts in ((s, drafts_of(s, seed, counts[s], levels, families)) for s in Split):
        (work / split).mkdir(parents=True)
        for draft in drafts:
            write(draft, work / split / draft.name)
            advance(1)
    os.rename(work, out)
    return counts


def split_counts(count: int) -> dict[Split, int]:
    """How many tasks each split gets; what rounding leaves is for training."""
    counts = {split: int(count * SHARES[split]) for split in Split}
    counts[Split.train] += count - sum(counts.values())
    return counts


def drafts_of(
    split: Split, seed: int, count: int, levels: tuple[int, ...], families: tuple[str, ...]
) -> Iterator[Draft]:
    """Every family in turn, then every level; no two with the same instruction."""
    instructions: set[str] = set()
    for index in range(count):
        family = families[index % len(families)]
        level = levels[index // len(families) % len(levels)]
        for turn in range(MOST_REDRAWS):
            drawn = draft(split, seed, index, turn, family, level)
            if drawn.instruction not in instructions:
                break
        else:
            raise UserError(
                f"{split} has no more different {family} tasks of level {level} after {index}; "
                "ask for fewer tasks, or more families and levels"
            )
        instructions.add(drawn.instruction)
        yield drawn


def draft(split: Split, seed: int, index: int, turn: int, family: str, level: int) -> Draft:
    """The task of these numbers, the same on every machine."""
    rng = random.Random(f"{split}/{seed}/{index}/{turn}")
    draw = Draw(rng, split)
    steps = tuple(rng.choice(FAMILIES[family])(draw) for _ in range(STEPS_OF_LEVEL[level]))
    return Draft(
        name=f"{family}-{level}-{index:06d}",
        family=family,
        level=level,
        split=split,
        seed=seed,
        steps=steps,
        draw=draw,
    )


def _refuse(out: Path, count: int, levels: tuple[int, ...], families: tuple[str, ...]) -> None:
    if out.exists():
        raise UserError(f"{out} exists; remove it or choose another destination")
    if count < 1:
        raise UserError(f"count is {count}; expected at least 1 task")
    for kind, given, known in (("level", levels, STEPS_OF_LEVEL), ("family", families, FAMILIES)):
        unknown = [item for item in given if item not in known]
        if unknown or not given:
            raise UserError(f"{kind} {unknown} is unknown; there are {list(known)}")
