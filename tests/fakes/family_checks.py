"""What every model family must show: logits at each position, and evidence for its flag.

Each check takes the models of a case and raises `AssertionError`. Nothing here knows a family:
which pages are moved, shared or given back follows from the layout alone.
"""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import lcm

import torch

from fakes.paged_rows import Feed, PagedRow, PagedRows, moved_pages, needed_pages
from fakes.tiny_family import FamilyModels, assert_close, is_close, logits_of
from tidegate.kvcache.layout import Group, Layout, Pages, Tokens

DECODE_WINDOWS = 3
DECODE_STEPS_MIN, DECODE_STEPS_MAX = 24, 96
SETTLING_STEPS_MAX = 160  # More than the longest tail of a tiny model.
STEPS_WITHOUT_WINDOW = 4  # Decode steps where all layers read everything.
# Of our error in bfloat16, as a multiple of the reference's: root mean squares. Where experts
# are chosen, near ties go either way.
BFLOAT16_ERROR_MAX = 2.5
EDGES_MAX = 8  # Of a group: so many of its first, and so many of its last.
NEAR = (-2, -1, 0, 1)  # From the first length past an edge: two on each side of it.


def check_whole_prompts(family: FamilyModels) -> None:
    """Prompts of many lengths in one launch, at every position; then at their ends only."""
    lengths = [*offsets(family.layout), 2 * reach(family.layout) + 37]
    texts = [family.tokens(length, seed) for seed, length in enumerate(lengths)]
    rows = family.pool(1)
    feeds = [Feed(rows.start(), text) for text in texts]
    logits = parts(rows.launch(feeds, every_position=True), lengths)
    for text, found in zip(texts, logits, strict=True):
        assert_close(found, family.expected(text), f"a prompt of {len(text)} tokens")
    rows = family.pool(2)
    feeds = [Feed(rows.start(), text, sample=n % 3 > 0) for n, text in enumerate(texts)]
    ends = torch.stack([found[-1] for n, found in enumerate(logits) if n % 3 > 0])
    assert_close(rows.launch(feeds), ends, "the last positions alone")


def check_chunks(family: FamilyModels) -> None:
    """Prompts cut at random positions, several rows in a launch, at every position."""
    for seed in range(3):
        chance = random.Random(seed)
        longest = 3 * reach(family.layout) + 20
        texts = [family.tokens(chance.randint(1, longest), 10 * seed + n) for n in range(4)]
        rows = family.pool(seed)
        active = [rows.start() for _ in texts]
        for text, found in zip(texts, feed_in_chunks(rows, active, texts, chance), strict=True):
            assert_close(found, family.expected(text), f"chunks of {len(text)} tokens")


def check_sampled_rows(family: FamilyModels) -> None:
    """Launches of chunks and single tokens of which some sample, as an engine makes them."""
    for seed in range(3):
        chance = random.Random(50 + seed)
        longest = 2 * reach(family.layout) + 20
        texts = [family.tokens(longest, 60 + 10 * seed + n) for n in range(4)]
        rows = family.pool(seed)
        active = [rows.start() for _ in texts]
        while any(row.length < longest for row in active):
            chosen = [n for n in range(4) if active[n].length < longest]
            feeds: list[Feed] = []
            expected: list[torch.Tensor] = []
            for n in chosen[chance.randrange(len(chosen)) :]:
                first = active[n].length
                count = min(longest - first, chance.choice((1, chance.randint(1, longest))))
                tokens = texts[n][first : first + count]
                feeds.append(Feed(active[n], tokens, sample=chance.random() < 0.6))
                if feeds[-1].sample:
                    expected.append(family.expected(texts[n])[first + count - 1])
            logits = rows.launch(feeds)
            assert len(logits) == len(expected)
            if expected:
                assert_close(logits, torch.stack(expected), "the sampled rows of a launch")


def check_decode(family: FamilyModels) -> None:
    """Three windows of decode, or as many steps as the bounds say, of several rows."""
    wanted = DECODE_WINDOWS * reach(family.layout)
    steps = max(DECODE_STEPS_MIN, min(wanted, DECODE_STEPS_MAX))
    prompts = [1, reach(family.layout), reach(family.layout) + 17]
    texts = [family.tokens(prompt + steps, seed) for seed, prompt in enumerate(prompts)]
    rows = family.pool(3)
    active = [rows.start() for _ in texts]
    starts = [text[:prompt] for text, prompt in zip(texts, prompts, strict=True)]
    feed_in_chunks(rows, active, starts, random.Random(4))
    for text, found in zip(texts, decode(rows, active, texts, steps), strict=True):
        assert_close(found, family.expected(text)[-steps:], f"decode from {len(text) - steps}")


def check_hand_off(family: FamilyModels, lengths: Sequence[int] = ()) -> None:
    """Decode elsewhere, from what the layout says is moved, is decode without a hand-off: at
    these lengths, in ascending order, or around every edge of the layout.

    Once what is to be moved has been copied, all pages of the source are given back and hold
    NaN; those that were not needed between chunks did so before. Where there are windows, the
    same with the flag forced to false, when all pages of a prompt are moved.
    """
    lengths = lengths or offsets(family.layout)
    _check_hand_off(family, lengths)
    if family.layout.swa_only_transfer:
        _check_hand_off(family.with_forced_flag(), lengths)


def _check_hand_off(family: FamilyModels, lengths: Sequence[int]) -> None:
    layout = family.layout
    steps = settling_steps(layout, lengths)
    tokens = family.tokens(lengths[-1] + steps, 5)
    texts = [tokens[: length + steps] for length in lengths]
    prompts = [tokens[:length] for length in lengths]
    outcomes: list[list[torch.Tensor]] = []
    for is_handed_over in (False, True):
        rows = family.pool(6)
        active = [rows.start() for _ in lengths]
        feed_in_chunks(rows, active, prompts, random.Random(7))
        if is_handed_over:
            source, rows = rows, family.pool(8)
            moved = [rows.hand_off(row, source) for row in active]
            for row, length in zip(active, lengths, strict=True):
                assert source.held(row) == [
                    high - low
                    for low, high in (
                        moved_pages(layout, group, Tokens(length)) for group in layout.groups
                    )
                ]
                source.drop(row)
            active = moved
        outcomes.append(decode(rows, active, texts, steps))
    for length, stayed, moved_on in zip(lengths, *outcomes, strict=True):
        assert torch.equal(stayed, moved_on), f"a hand-off at {length} changed the logits"
        expected = family.expected(tokens)[length : length + steps]
        assert_close(moved_on, expected, f"decode after a hand-off at {length}")


def check_that_every_moved_page_is_needed(
    family: FamilyModels, lengths: Sequence[int] = ()
) -> None:
    """A hand-off that leaves out any one of the pages gives other logits, sooner or later; one
    that leaves out none does not. Pages without a whole entry of any tensor hold nothing yet.
    """
    layout, lengths = family.layout, lengths or offsets(family.layout)
    steps = settling_steps(layout, lengths)
    tokens = family.tokens(lengths[-1] + steps, 9)
    source = family.pool(10)
    sources = [source.start() for _ in lengths]
    prompts = [tokens[:length] for length in lengths]
    feed_in_chunks(source, sources, prompts, random.Random(11))
    target = family.pool(12)
    complete = [target.hand_off(row, source) for row in sources]
    unnoticed: list[tuple[PagedRow, tuple[int, int, int]]] = []
    for row in sources:
        for number, group in enumerate(layout.groups):
            for index in range(*needed_pages(group, Tokens(row.length))):
                if not holds_an_entry(group, index, row.length):
                    continue
                copy = target.hand_off(row, source, left_out=(number, index))
                unnoticed.append((copy, (row.length, number, index)))
    assert unnoticed
    texts = [tokens[: length + steps] for length in lengths]
    for found, length in zip(decode(target, complete, texts, steps), lengths, strict=True):
        expected = family.expected(tokens)[length : length + steps]
        assert_close(found, expected, f"decode from {length} with all pages")
    for _ in range(steps):
        expected = family.expected(tokens)[[row.length for row, _ in unnoticed]]
        logits = target.launch([Feed(row, [tokens[row.length]]) for row, _ in unnoticed])
        unnoticed = [
            entry
            for entry, found, wanted in zip(unnoticed, logits, expected, strict=True)
            if is_close(found, wanted)
        ]
        if not unnoticed:
            return
    left = [place for _, place in unnoticed]
    raise AssertionError(f"(length, group, page) of which nothing was read: {left}")


def check_prefix_hits(family: FamilyModels) -> None:
    """A row may begin at any length of whole pages with another row's pages.

    It takes over, of a longer row that ends otherwise, what its queries read: [0, n) or
    [first_needed(n), n). All else holds NaN.
    """
    layout = family.layout
    unit = lcm(*(int(group.page_tokens) for group in layout.groups))
    hits = range(unit, offsets(layout)[-1] + unit, unit)
    steps, extra = settling_steps(layout, hits), 7
    tokens = family.tokens(hits[-1] + extra + steps, 13)
    donors = [tokens[:hit] + family.tokens(9, hit) for hit in hits]
    rows = family.pool(14)
    active = [rows.start(keeps_all=True) for _ in hits]
    feed_in_chunks(rows, active, donors, random.Random(15))
    active = [rows.adopt(donor, hit) for donor, hit in zip(active, hits, strict=True)]
    prompts = [tokens[: hit + extra] for hit in hits]
    prefilled = feed_in_chunks(rows, active, prompts, random.Random(16))
    texts = [prompt + tokens[len(prompt) :][:steps] for prompt in prompts]
    decoded = decode(rows, active, texts, steps)
    for hit, first, second in zip(hits, prefilled, decoded, strict=True):
        expected = family.expected(tokens)[hit : hit + extra + steps]
        assert_close(torch.cat([first, second]), expected, f"a prefix hit of {hit} tokens")


def check_resume(family: FamilyModels) -> None:
    """A row that is dropped in the middle of its output goes on from prompt and output."""
    distance = reach(family.layout)
    texts = [family.tokens(length, length) for length in (9, distance + 30, 2 * distance + 21)]
    outputs = (3, distance + 2, distance + 9)
    steps = 5
    rows, elsewhere = family.pool(17), family.pool(18)
    active = [rows.start() for _ in texts]
    prompts = [text[: -output - steps] for text, output in zip(texts, outputs, strict=True)]
    prompts = [prompt or text[:1] for prompt, text in zip(prompts, texts, strict=True)]
    feed_in_chunks(rows, active, prompts, random.Random(19))
    for row, text in zip(active, texts, strict=True):
        while row.length < len(text) - steps:
            rows.launch([Feed(row, [text[row.length]], sample=False)])
        rows.drop(row)
    for pool, seed in ((rows, 20), (elsewhere, 21)):
        active = [pool.start() for _ in texts]
        whole = [text[:-steps] for text in texts]
        prefilled = feed_in_chunks(pool, active, whole, random.Random(seed))
        decoded = decode(pool, active, texts, steps)
        for text, first, second in zip(texts, prefilled, decoded, strict=True):
            found = torch.cat([first, second])
            assert_close(found, family.expected(text), f"resumed at {len(text) - steps}")


def check_bfloat16(family: FamilyModels) -> None:
    """Of models in bfloat16: about as near to float32 as the reference is, at each position, in
    chunks and after a hand-off.

    A hand-off moves bits, so it changes nothing where the same launches give the same bits.
    """
    length, steps = 2 * reach(family.layout) + 30, 10
    texts = [family.tokens(length + steps, 70 + n) for n in range(4)]
    prompts = [text[:length] for text in texts]
    outcomes: list[torch.Tensor] = []
    for is_handed_over in (False, True):
        rows = family.pool(22)
        active = [rows.start() for _ in texts]
        prefilled = feed_in_chunks(rows, active, prompts, random.Random(23))
        if is_handed_over:
            source, rows = rows, family.pool(24)
            active = [rows.hand_off(row, source) for row in active]
        decoded = decode(rows, active, texts, steps)
        outcomes.append(torch.cat([*prefilled, *decoded]))
    reference = family.bfloat16_reference()

    def in_order(texts_logits: list[torch.Tensor]) -> torch.Tensor:
        firsts = [logits[:length] for logits in texts_logits]
        return torch.cat([*firsts, *(logits[length:] for logits in texts_logits)])

    wanted = in_order([family.expected(text) for text in texts])
    rounded = in_order([logits_of(reference, text) for text in texts])
    *errors, usual = (
        (found - wanted).square().mean().sqrt().item() for found in (*outcomes, rounded)
    )
    assert max(errors) <= BFLOAT16_ERROR_MAX * usual, (errors, usual)
    if family.device == "cpu":
        assert torch.equal(*outcomes), "a hand-off changed the logits"


CHECKS: tuple[Callable[[FamilyModels], None], ...] = (
    check_whole_prompts,
    check_chunks,
    check_sampled_rows,
    check_decode,
    check_hand_off,
    check_that_every_moved_page_is_needed,
    check_prefix_hits,
    check_resume,
)


def reach(layout: Layout) -> int:
    """How far back the groups look that forget: a window, or a tail. 1 if none forgets."""
    lengths = (group.first_past(Tokens(1)) for group in layout.groups)
    return max((int(length) for length in lengths if length is not None), default=1)


def offsets(layout: Layout) -> list[int]:
    """Two lengths on each side of every edge of a page, and of what is still needed, up to two
    pages past the place from which on the oldest positions are forgotten. Of a group with
    many edges, the first and the last ones.
    """
    end = reach(layout) + 2 * max(group.page_tokens for group in layout.groups) + 1

    def pages(group: Group, length: int) -> tuple[object, ...]:
        first = group.first_needed(Tokens(length))
        return (*needed_pages(group, Tokens(length)), first > 0)

    lengths: set[int] = set()
    for group in layout.groups:
        edges = [n for n in range(1, end) if pages(group, n) != pages(group, n - 1)]
        kept = {*edges[:EDGES_MAX], *edges[-EDGES_MAX:]}
        lengths |= {n + d for n in kept for d in NEAR if n + d >= 1}
    return sorted(lengths)


def holds_an_entry(group: Group, index: int, length: int) -> bool:
    """Whether a row of `length` positions has a whole entry in its page with this index."""
    start = group.start_of(Pages(index))
    return any(start + spec.tokens_per_entry <= length for spec in group.tensors)


def settling_steps(layout: Layout, lengths: Sequence[int]) -> int:
    """After how many steps of decode nothing is read any more that was there before, but for
    groups that read all.
    """
    past = [
        length_past - length
        for length in lengths
        for length_past in (group.first_past(Tokens(length)) for group in layout.groups)
        if length_past is not None
    ]
    return min(max(past, default=0) + STEPS_WITHOUT_WINDOW, SETTLING_STEPS_MAX)


def feed_in_chunks(
    rows: PagedRows,
    active: Sequence[PagedRow],
    texts: Sequence[list[int]],
    chance: random.Random,
) -> list[torch.Tensor]:
    """Feed each row up to the end of its text, in launches that take random chunks of random
    rows. Returns the logits of all positions that were fed, row by row.
    """
    found: list[list[torch.Tensor]] = [[] for _ in active]
    chunk_max = 1 + max(len(text) for text in texts) // 2
    while True:
        unfinished = [n for n, row in enumerate(active) if row.length < len(texts[n])]
        if not unfinished:
            return [torch.cat(pieces) for pieces in found]
        chosen = [n for n in unfinished if chance.random() < 0.8] or unfinished
        chance.shuffle(chosen)
        feeds: list[Feed] = []
        for n in chosen:
            first = active[n].length
            count = 1 if chance.random() < 0.1 else chance.randint(1, chunk_max)
            feeds.append(Feed(active[n], texts[n][first : first + count]))
        logits = rows.launch(feeds, every_position=True)
        pieces = parts(logits, [len(feed.tokens) for feed in feeds])
        for n, piece in zip(chosen, pieces, strict=True):
            found[n].append(piece)


def parts(logits: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """The logits of feeds of these lengths."""
    ends = list(accumulate(lengths))
    return [logits[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def decode(
    rows: PagedRows, active: Sequence[PagedRow], texts: Sequence[list[int]], steps: int
) -> list[torch.Tensor]:
    """Feed the last `steps` tokens of each row's text, all rows together. Returns logits
    [steps, vocabulary] for each row.
    """
    found: list[torch.Tensor] = []
    for _ in range(steps):
        feeds = [Feed(row, [text[row.length]]) for row, text in zip(active, texts, strict=True)]
        found.append(rows.launch(feeds))
    for row, text in zip(active, texts, strict=True):
        assert row.length == len(text)
    return list(torch.stack(found, 1))
