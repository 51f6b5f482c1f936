"""A worker with a prefix cache, played by hand: it writes what its launches write.

Every slot of every page holds a number that stands for all tokens up to its position. So
whatever a row reads, or a hit offers, can be compared with what should be there. Need is
computed from the definition: position by position, page by page.
"""

from collections.abc import Sequence

from tidegate.kvcache.books import Books, Holding
from tidegate.kvcache.demand import Leg, Lengths, floors
from tidegate.kvcache.layout import Group, Layout, PageId, Reach, Tail, Tokens, Window
from tidegate.kvcache.page_table import run_starts
from tidegate.kvcache.prefix_node import Node
from tidegate.kvcache.prefix_row import Hit

Prompt = tuple[int, ...]
Slot = tuple[int, int, int]  # Group, page, slot.
PageKey = tuple[int, Prompt, int]  # Group, tokens up to the unit's end, the page's end.


def layout_of(*groups: tuple[Reach, int], whole_windows: bool = False) -> Layout:
    """A layout of groups with these reaches and page sizes."""
    has_window = any(isinstance(reach, Window) for reach, _ in groups)
    return Layout(
        tuple(
            Group(f"g{index}", reach, Tokens(page_tokens), ())
            for index, (reach, page_tokens) in enumerate(groups)
        ),
        not whole_windows if has_window else None,
    )


class Row:
    """A prompt that runs, and then some tokens after it."""

    def __init__(self, prompt: Prompt, output: int, holding: Holding, hit: Hit | None) -> None:
        self.tokens = prompt + (0,) * output
        self.prompt = prompt
        self.holding = holding
        self.hit = hit
        self.settled = 0 if hit is None else hit.tokens
        self.until: int | None = None  # While a launch is in flight.


class CachedWorker:
    """Rows are of role both, or with `whole_windows` those of a source whose flag is false."""

    def __init__(
        self, layout: Layout, page_counts: Sequence[int], *, whole_windows: bool = False
    ) -> None:
        self.layout = layout
        self.keeps_windows = whole_windows
        self.books = Books(layout, page_counts, caches=True, whole_windows=whole_windows)
        assert self.books.cache is not None
        self.cache = self.books.cache
        self.unit = self.cache.unit
        self.rows: list[Row] = []
        self.slots: dict[Slot, int] = {}
        self.plan = 0
        # Launches of withdrawn rows: plan, what they read and saw, what they will write.
        self.late: list[tuple[int, dict[Slot, int], dict[Slot, int]]] = []
        self._numbers: dict[Prompt, int] = {}
        self.prompts: dict[int, Prompt] = {}

    def number(self, tokens: Prompt) -> int:
        """What stands for these tokens: in slots, and as a unit's hash."""
        number = self._numbers.setdefault(tokens, len(self._numbers))
        self.prompts[number] = tokens
        return number

    def chain(self, prompt: Prompt) -> list[int]:
        ends = range(self.unit, len(prompt) + 1, self.unit)
        return [self.number(prompt[:end]) for end in ends]

    def find(self, prompt: Prompt) -> Hit | None:
        """What the cache finds, which must be right and the longest there is."""
        return self.books.find(
            self.chain(prompt), Tokens(len(prompt)), keeps_windows=self.keeps_windows
        )

    def start(self, prompt: Prompt, output: int = 1) -> Row | None:
        """Admit a request of these lengths, if its floors are available."""
        hit = self.find(prompt)
        assert hit is not None
        leg = Leg.SOURCE if self.keeps_windows else Leg.WHOLE
        output = 1 if self.keeps_windows else output
        lengths = Lengths(Tokens(len(prompt)), Tokens(output))
        groups, keeps = self.layout.groups, self.keeps_windows
        holding = self.books.open(
            floors(self.layout, leg, lengths),
            run_starts(groups, hit.tokens, keeps_windows=keeps),
            keeps_windows=keeps,
            hit=hit,
        )
        if holding is None:
            return None
        row = Row(prompt, output, holding, hit)
        self.rows.append(row)
        return row

    def launch(self, row: Row, count: int, *, surplus: bool = True) -> int:
        """Begin a launch of up to `count` positions; returns where pages cut it."""
        assert row.until is None
        end = len(row.prompt) if row.settled < len(row.prompt) else len(row.tokens) - 1
        until = min(row.settled + count, end)
        for index in range(len(self.layout.groups)):
            self.books.cover(row.holding, index, Tokens(until), surplus=surplus)
        until = min(until, row.holding.covered)
        row.until = until
        return until

    def settle(self, row: Row) -> None:
        """The launch is over: check what it read, write what it wrote, tell the books."""
        assert row.until is not None
        for slot, number in self.reads(row).items():
            assert self.slots.get(slot) == number, f"slot {slot} has other tokens"
        self.slots.update(self.writes(row))
        row.settled, row.until = row.until, None
        if row.settled <= len(row.prompt):
            self.books.publish(row.holding, Tokens(row.settled))
        self.books.reclaim(row.holding, Tokens(row.settled))

    def run(self, row: Row, chunk: int = 1_000_000) -> Row:
        """Launch until prompt and output are done."""
        while row.settled < len(row.tokens) - 1 or row.settled < len(row.prompt):
            assert self.launch(row, chunk) > row.settled
            self.settle(row)
        return row

    def withdraw(self, row: Row) -> None:
        """Stop the row, even in the middle of a launch, which then goes on for a while."""
        self.plan += 1
        if row.until is not None:
            seen = {slot: self.slots[slot] for slot in self.reads(row)}
            garbage = dict.fromkeys(self.writes(row), -1)
            self.late.append((self.plan, seen, garbage))
        self.rows.remove(row)
        self.books.withdraw(row.holding, self.plan)

    def complete(self, plan: int) -> None:
        """Launches under plans up to this one end: nobody has touched what they touched."""
        for due, seen, garbage in self.late:
            if due > plan:
                continue
            assert all(self.slots[slot] == number for slot, number in seen.items())
            for slot in garbage:
                group, page, _ = slot
                pool = self.books.pools[group]
                assert pool.owner(PageId(page)) is None and not pool.is_shared(PageId(page))
            self.slots.update(garbage)
        self.late = [each for each in self.late if each[0] > plan]
        self.books.complete(plan)

    def finish(self, row: Row) -> None:
        self.withdraw(row)
        self.complete(self.plan)

    def serve(self, prompt: Prompt, output: int = 1, chunk: int = 1_000_000) -> int:
        """Run a whole request; returns how many of its tokens were cached."""
        row = self.start(prompt, output)
        assert row is not None
        self.finish(self.run(row, chunk))
        return row.holding.cached_tokens

    def reads(self, row: Row) -> dict[Slot, int]:
        """What a launch from the settled position on reads of what is there before it."""
        return {
            self._slot(row.holding, index, position): self.number(row.tokens[: position + 1])
            for index, group in enumerate(self.layout.groups)
            for position in range(group.first_needed(Tokens(row.settled)), row.settled)
        }

    def writes(self, row: Row) -> dict[Slot, int]:
        """Of a tail group only what the end of the launch needs."""
        assert row.until is not None
        written: dict[Slot, int] = {}
        for index, group in enumerate(self.layout.groups):
            first = row.settled
            if isinstance(group.reach, Tail):
                first = max(first, group.first_needed(Tokens(row.until)))
            for position in range(first, row.until):
                slot = self._slot(row.holding, index, position)
                written[slot] = self.number(row.tokens[: position + 1])
        return written

    def _slot(self, holding: Holding, index: int, position: int) -> Slot:
        group = self.layout.groups[index]
        table = holding.tables[index]
        (page,) = table.pages(position // group.page_tokens, 1)
        return index, page, position % group.page_tokens

    # What the cache has, by definition.

    def cached(self) -> dict[PageKey, PageId]:
        found: dict[PageKey, PageId] = {}
        tree = self.cache.tree
        for node in tree.nodes.values():
            prompt = self._prompt(node)
            parts = list(zip(tree.whole_groups, node.whole, strict=True))
            parts += [(g, p.ids) for g, p in zip(tree.rolling_groups, node.parts, strict=True)]
            for index, pages in parts:
                size = self.layout.groups[index].page_tokens
                for back, page in enumerate(reversed(pages)):
                    found[index, prompt, len(prompt) - back * size] = page
        return found

    def needed(self, prompt: Prompt) -> dict[PageKey, int]:
        """What a hit of the whole of this prompt needs: pages, and from where in each."""
        needed: dict[PageKey, int] = {}
        for index, group in enumerate(self.layout.groups):
            is_whole = self.cache.is_whole[index]
            first = 0 if is_whole else group.first_needed(Tokens(len(prompt)))
            size = group.page_tokens
            for end in range(first // size * size + size, len(prompt) + 1, size):
                unit_end = -(-end // self.unit) * self.unit
                needed[index, prompt[:unit_end], end] = max(first, end - size)
        return needed

    def longest_hit(self, prompt: Prompt, cached: dict[PageKey, PageId]) -> int:
        """Tried one by one. A state of which nothing is kept is not found."""
        ends = range(self.unit, len(prompt), self.unit)
        needs = {end: self.needed(prompt[:end]) for end in ends}
        hits = (n for n, needed in needs.items() if needed and needed.keys() <= cached.keys())
        return max(hits, default=0)

    def check(self) -> None:
        """The books agree; what is kept is of use, is right, and is found."""
        self.books.check()
        cached = self.cached()
        useful: set[PageKey] = set()
        for node in self.cache.tree.nodes.values():
            prompt = self._prompt(node)
            longer = (*prompt, -1)
            hit = self.find(longer)
            assert hit is not None and hit.tokens == self.longest_hit(longer, cached)
            needed = self.needed(prompt[: hit.tokens])
            for index in range(len(self.layout.groups)):
                pages = tuple(cached[key] for key in needed if key[0] == index)
                assert tuple(self.cache.pages(hit, index)) == pages
            if hit.tokens == len(prompt):
                useful.update(needed)
            for (index, _, end), first in needed.items():
                page = cached[index, prompt[: -(-end // self.unit) * self.unit], end]
                for position in range(first, end):
                    slot = index, page, position % self.layout.groups[index].page_tokens
                    assert self.slots[slot] == self.number(prompt[: position + 1]), "stale"
        assert useful == set(cached), "a page is kept that no hit can use"

    def _prompt(self, node: Node) -> Prompt:
        assert isinstance(node.key, int)
        return self.prompts[node.key]
