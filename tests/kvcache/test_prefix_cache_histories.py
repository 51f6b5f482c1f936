"""Long random histories of many rows, drawn from a seed, with all checks after each step.

They reach states with more rows and fuller pools than drawn examples do; see the machine.
"""

import random

import pytest

from fakes.cached_worker import CachedWorker, Prompt, Row, layout_of
from tidegate.kvcache.layout import All, Reach, Tail, Tokens, Window

STEP_COUNT = 150
SEEDS = range(40)


def window(dice: random.Random) -> Reach:
    return Window(Tokens(dice.choice((1, 2, 3, 4, 5, 6, 8, 9, 13, 20))))


def tail(dice: random.Random) -> Reach:
    return Tail(Tokens(dice.choice((1, 2, 3, 4, 6, 8, 12))), dice.randrange(3))


def worker(dice: random.Random) -> CachedWorker:
    kinds: list[list[Reach]] = [
        [All()],
        [All(), window(dice)],
        [window(dice)],
        [All(), window(dice), tail(dice)],
        [window(dice), tail(dice)],
        [All(), tail(dice), tail(dice)],
    ]
    reaches = dice.choice(kinds)
    size = dice.choice((1, 2, 3, 4))
    sizes = [size if dice.random() < 0.5 else dice.choice((1, 2, 4)) for _ in reaches]
    whole = any(isinstance(reach, Window) for reach in reaches) and dice.random() < 0.3
    layout = layout_of(*zip(reaches, sizes, strict=True), whole_windows=whole)
    counts = [dice.randrange(4, dice.choice((40, 80))) for _ in reaches]
    return CachedWorker(layout, counts, whole_windows=whole)


def prompt(dice: random.Random, stems: list[Prompt]) -> Prompt:
    """A stem's beginning, or one that parts from it somewhere."""
    stem, length = dice.choice(stems), dice.randrange(1, len(stems[0]))
    shared = length if dice.random() < 0.5 else dice.randrange(length)
    return stem[:shared] + tuple(dice.randrange(1, 3) for _ in range(length - shared))


def is_ready(row: Row) -> bool:
    return row.until is None and row.settled < max(len(row.prompt), len(row.tokens) - 1)


def step(dice: random.Random, cached: CachedWorker, stems: list[Prompt]) -> None:
    ready = [row for row in cached.rows if is_ready(row)]
    launched = [row for row in cached.rows if row.until is not None]
    match dice.choices(range(6), (25, 30, 25, 8, 10, 2))[0]:
        case 0:
            cached.start(prompt(dice, stems), dice.choice((1, 1, 3, 8)))
        case 1 if ready:
            row = dice.choice(ready)
            surplus = dice.random() < 0.7
            assert cached.launch(row, dice.randrange(1, 30), surplus=surplus) > row.settled
        case 2 if launched:
            cached.settle(dice.choice(launched))
        case 3 if cached.rows:
            cached.withdraw(dice.choice(cached.rows))
        case 4:
            cached.complete(max(0, cached.plan - dice.randrange(3)))
        case 5:
            group = dice.randrange(len(cached.books.pools))
            if cached.books.pools[group].idle_count:
                cached.cache.evict(group)
        case _:
            pass
    cached.check()


def run(seed: int) -> None:
    dice = random.Random(seed)
    cached = worker(dice)
    counts = [pool.page_count for pool in cached.books.pools]
    stems = [tuple(dice.randrange(1, 3) for _ in range(60)) for _ in range(3)]
    for _ in range(STEP_COUNT):
        step(dice, cached, stems)
    for row in tuple(cached.rows):
        for group in range(len(counts)):
            lacking = row.holding.lacks(group)
            taken = cached.books.cover(row.holding, group, Tokens(10_000), surplus=False)
            assert len(taken) == lacking
        cached.books.check()
    for row in tuple(cached.rows):
        cached.withdraw(row)
    cached.complete(cached.plan)
    cached.books.evict_all()
    cached.check()
    assert not cached.cache.tree.nodes
    assert [pool.free_count for pool in cached.books.pools] == counts


@pytest.mark.parametrize("seed", SEEDS)
def test_every_history_keeps_every_promise(seed: int) -> None:
    run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(20))
def test_two_thousand_histories_keep_every_promise(hundred: int) -> None:
    for seed in range(1000 + 100 * hundred, 1100 + 100 * hundred):
        run(seed)


def test_the_same_history_gives_the_same_pages() -> None:
    """Nothing depends on the order of a set, or on where an object lies."""

    def trace(seed: int) -> list[tuple[int, ...]]:
        dice = random.Random(seed)
        cached = worker(dice)
        stems = [tuple(dice.randrange(1, 3) for _ in range(60)) for _ in range(3)]
        seen: list[tuple[int, ...]] = []
        for _ in range(STEP_COUNT):
            step(dice, cached, stems)
            seen += [table.ids for row in cached.rows for table in row.holding.tables]
        return seen

    assert trace(7) == trace(7)
