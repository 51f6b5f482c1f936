"""The books against a model that counts every page by hand, through any history."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from tidegate.kvcache.books import Books, Holding
from tidegate.kvcache.layout import All, Group, Layout, Pages, Reach, Tail, Tokens, Window
from tidegate.kvcache.page_table import run_starts

REACHES: st.SearchStrategy[Reach] = st.one_of(
    st.just(All()),
    st.builds(Window, st.integers(1, 9).map(Tokens)),
    st.builds(Tail, st.integers(1, 4).map(Tokens), st.integers(0, 1)),
)
GROUPS = st.builds(Group, st.just("g"), REACHES, st.integers(1, 4).map(Tokens), st.just(()))
SHARES = st.lists(st.integers(0, 5), min_size=3, max_size=3)


class Model:
    """One holding: for each group the positions' pages, by page index, and the reserve."""

    def __init__(self, reserve: list[int], firsts: list[int], keeps_windows: bool) -> None:
        self.reserve = reserve
        self.pages: list[dict[int, int]] = [{} for _ in reserve]
        self.nexts = firsts
        self.keeps_windows = keeps_windows

    def promised(self, group: int) -> int:
        return max(0, self.reserve[group] - len(self.pages[group]))


class BooksMachine(RuleBasedStateMachine):
    holdings: "Bundle[Holding]" = Bundle("holdings")

    @initialize(
        groups=st.lists(GROUPS, min_size=1, max_size=3),
        counts=st.lists(st.integers(1, 12), min_size=3, max_size=3),
    )
    def begin(self, groups: list[Group], counts: list[int]) -> None:
        self.groups = groups
        self.totals = counts[: len(groups)]
        flag = False if any(group.is_window for group in groups) else None
        self.books = Books(Layout(tuple(groups), flag), self.totals, note_freed=True)
        self.models: dict[int, Model] = {}
        self.living: list[Holding] = []
        self.draining: list[tuple[int, list[set[int]]]] = []
        self.freed: list[list[int]] = [[] for _ in groups]
        self.plan = 1

    def free(self, group: int) -> set[int]:
        owned = {p for model in self.models.values() for p in model.pages[group].values()}
        drained = {p for _, pages in self.draining for p in pages[group]}
        return set(range(self.totals[group])) - owned - drained

    def available(self, group: int) -> int:
        promised = sum(model.promised(group) for model in self.models.values())
        return len(self.free(group)) - promised

    @rule(target=holdings, share=SHARES, first_query=st.integers(0, 20), keeps=st.booleans())
    def open(
        self, share: list[int], first_query: int, keeps: bool
    ) -> "Holding | MultipleResults[Holding]":
        reserve = share[: len(self.groups)]
        fits = all(pages <= self.available(g) for g, pages in enumerate(reserve))
        starts = run_starts(self.groups, Tokens(first_query), keeps_windows=keeps)
        holding = self.books.open(
            [Pages(pages) for pages in reserve], starts, keeps_windows=keeps
        )
        assert (holding is not None) == fits
        if holding is None:
            nothing: MultipleResults[Holding] = multiple()
            return nothing
        firsts = [s // group.page_tokens for s, group in zip(starts, self.groups, strict=True)]
        self.models[holding.holding_id] = Model(list(reserve), firsts, keeps)
        self.living.append(holding)
        return holding

    @rule(
        holding=holdings,
        group=st.integers(0, 2),
        until=st.integers(0, 60),
        surplus=st.booleans(),
    )
    def cover(self, holding: Holding, group: int, until: int, surplus: bool) -> None:
        group %= len(self.groups)
        model = self.models[holding.holding_id]
        free = self.free(group)
        wanted = max(0, -(-until // self.groups[group].page_tokens) - model.nexts[group])
        limit = model.promised(group) + (self.available(group) if surplus else 0)
        pages = self.books.cover(holding, group, Tokens(until), surplus=surplus)
        assert len(pages) == min(wanted, limit)
        assert set(pages) <= free and len(set(pages)) == len(pages)
        for page in pages:
            model.pages[group][model.nexts[group]] = page
            model.nexts[group] += 1

    @rule(holding=holdings, back=st.integers(0, 10))
    def reclaim(self, holding: Holding, back: int) -> None:
        """The holding is settled up to some position that its pages cover."""
        model = self.models[holding.holding_id]
        settled = max(0, holding.covered - back)
        self.books.reclaim(holding, Tokens(settled))
        for index, group in enumerate(self.groups):
            if model.keeps_windows and group.is_window:
                continue
            needed = group.first_needed(Tokens(settled))
            pages = model.pages[index]
            for page_index in sorted(pages):
                if (page_index + 1) * group.page_tokens <= needed:
                    self.freed[index].append(pages.pop(page_index))

    @rule(holding=holdings)
    def release_windows(self, holding: Holding) -> None:
        holding.keeps_windows = self.models[holding.holding_id].keeps_windows = False

    @rule(holding=holdings, share=SHARES)
    def lower(self, holding: Holding, share: list[int]) -> None:
        model = self.models[holding.holding_id]
        model.reserve = [min(a, b) for a, b in zip(model.reserve, share, strict=False)]
        self.books.lower(holding, [Pages(pages) for pages in model.reserve])

    @rule(holding=holdings)
    def close(self, holding: Holding) -> None:
        model = self.models[holding.holding_id]
        model.reserve = [
            min(r, len(p)) for r, p in zip(model.reserve, model.pages, strict=True)
        ]
        self.books.close(holding)

    @rule(holding=consumes(holdings), later=st.integers(0, 2))
    def withdraw(self, holding: Holding, later: int) -> None:
        self.plan += later
        model = self.models.pop(holding.holding_id)
        self.books.withdraw(holding, self.plan)
        self.draining.append((self.plan, [set(p.values()) for p in model.pages]))

    @rule(back=st.integers(0, 3))
    def complete(self, back: int) -> None:
        plan = self.plan - back
        self.books.complete(plan)
        for due, pages in self.draining:
            if due <= plan:
                for index, ids in enumerate(pages):
                    self.freed[index] += sorted(ids)
        self.draining = [(due, pages) for due, pages in self.draining if due > plan]

    @rule()
    def take_freed(self) -> None:
        found = self.books.take_freed()
        assert [sorted(ids) for ids in found] == [sorted(ids) for ids in self.freed]
        self.freed = [[] for _ in self.groups]

    @invariant()
    def every_page_is_where_the_model_has_it(self) -> None:
        self.books.check()
        for index, pool in enumerate(self.books.pools):
            assert pool.free_count == len(self.free(index))
            assert self.books.available(index) == self.available(index) >= 0
            drained = sum(len(pages[index]) for _, pages in self.draining)
            assert pool.draining_count == drained
            assert pool.free_count + pool.owned_count + drained == self.totals[index]
        assert self.books.is_draining == any(any(pages) for _, pages in self.draining)

    def teardown(self) -> None:
        """Every promise can be taken, by all holdings together; then everything comes back."""
        if not hasattr(self, "books"):
            return
        living = [h for h in self.living if h.holding_id in self.models]
        assert len(living) == len(self.models)
        for holding in living:
            for index in range(len(self.groups)):
                promised = holding.promised(index)
                taken = self.books.cover(holding, index, Tokens(10_000), surplus=False)
                assert len(taken) == promised
        for holding in living:
            self.books.withdraw(holding, self.plan)
        self.books.complete(self.plan)
        self.books.check()
        assert self.books.is_idle
        assert [pool.free_count for pool in self.books.pools] == self.totals


BooksMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
TestBooks = BooksMachine.TestCase
