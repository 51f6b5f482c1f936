"""Cached rows through any history, against a worker that knows what is in every page.

After each step: every page has one state and every promise is covered; what is kept is of use
to some hit, has the right content and is found; a lookup finds the longest hit there is; and
no row has read, or is about to read, anything but its own tokens.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fakes.cached_worker import CachedWorker, Prompt, Row, layout_of
from tidegate.kvcache.layout import All, Pages, Reach, Tail, Tokens, Window

ALL: st.SearchStrategy[Reach] = st.just(All())
WINDOW: st.SearchStrategy[Reach] = st.builds(Window, st.integers(1, 14).map(Tokens))
TAIL: st.SearchStrategy[Reach] = st.builds(
    Tail, st.integers(1, 9).map(Tokens), st.integers(0, 2)
)
KINDS = st.sampled_from(
    (
        (ALL,),
        (ALL, WINDOW),
        (WINDOW,),
        (ALL, WINDOW, TAIL),
        (WINDOW, TAIL),
        (ALL, TAIL, TAIL),
        (WINDOW, ALL, WINDOW),
    )
)
LENGTHS = st.sampled_from((50, 49, 37, 36, 31, 25, 24, 23, 17, 16, 13, 8, 5, 1))
CHUNKS = st.sampled_from((50, 16, 12, 7, 3))
TOKENS = st.lists(st.integers(1, 2), min_size=50, max_size=50).map(tuple)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        reaches=KINDS.flatmap(lambda kinds: st.tuples(*kinds)),
        pages=st.lists(st.sampled_from((1, 2, 3, 4)), min_size=3, max_size=3),
        is_one_size=st.booleans(),
        counts=st.lists(st.sampled_from((40, 30, 60, 20, 10, 5)), min_size=3, max_size=3),
        stems=st.lists(TOKENS, min_size=2, max_size=2),
        whole_windows=st.booleans(),
    )
    def begin(
        self,
        reaches: tuple[Reach, ...],
        pages: list[int],
        is_one_size: bool,
        counts: list[int],
        stems: list[Prompt],
        whole_windows: bool,
    ) -> None:
        sizes = [pages[0]] * 3 if is_one_size else pages
        whole_windows &= any(isinstance(reach, Window) for reach in reaches)
        layout = layout_of(*zip(reaches, sizes, strict=False), whole_windows=whole_windows)
        self.counts = counts[: len(reaches)]
        self.worker = CachedWorker(layout, self.counts, whole_windows=whole_windows)
        self.stems = stems

    def admit(self, stem: int, shared: int, more: int, output: int) -> Row | None:
        """A prompt that parts from a stem somewhere, or ends there; None if it does not fit."""
        return self.worker.start(self.stems[stem][:shared] + (3 + more,) * more, output)

    def ready(self) -> list[Row]:
        return [
            row
            for row in self.worker.rows
            if row.until is None and row.settled < max(len(row.prompt), len(row.tokens) - 1)
        ]

    def launched(self) -> list[Row]:
        return [row for row in self.worker.rows if row.until is not None]

    @rule(
        stem=st.integers(0, 1), shared=LENGTHS, more=st.integers(0, 8), output=st.integers(1, 6)
    )
    def start(self, stem: int, shared: int, more: int, output: int) -> None:
        self.admit(stem, shared, more, output)

    @rule(stem=st.integers(0, 1), shared=LENGTHS, more=st.integers(0, 8), chunk=CHUNKS)
    def serve(self, stem: int, shared: int, more: int, chunk: int) -> None:
        """A whole request, if it fits now."""
        row = self.admit(stem, shared, more, 1)
        if row is not None:
            self.worker.run(row, chunk)
            self.worker.withdraw(row)

    @precondition(lambda self: self.ready())
    @rule(which=st.integers(0, 20), count=st.integers(1, 30), surplus=st.booleans())
    def launch(self, which: int, count: int, surplus: bool) -> None:
        """A row whose floor is reserved always goes on."""
        ready = self.ready()
        row = ready[which % len(ready)]
        assert self.worker.launch(row, count, surplus=surplus) > row.settled

    @precondition(lambda self: self.launched())
    @rule(which=st.integers(0, 20))
    def settle(self, which: int) -> None:
        launched = self.launched()
        self.worker.settle(launched[which % len(launched)])

    @precondition(lambda self: self.worker.rows)
    @rule(which=st.integers(0, 20))
    def withdraw(self, which: int) -> None:
        self.worker.withdraw(self.worker.rows[which % len(self.worker.rows)])

    @rule(back=st.integers(0, 2))
    def complete(self, back: int) -> None:
        self.worker.complete(max(0, self.worker.plan - back))

    @rule(group=st.integers(0, 2))
    def evict(self, group: int) -> None:
        group %= len(self.counts)
        if self.worker.books.pools[group].idle_count:
            self.worker.cache.evict(group)

    @rule(is_wanted=st.sampled_from((False,) * 7 + (True,)))
    def all_that_is_available_can_be_had(self, is_wanted: bool) -> None:
        """By a row that wants it all, which then goes away. It empties the cache: seldom."""
        if not is_wanted:
            return
        books, worker = self.worker.books, self.worker
        reserve = [books.available(group) for group in range(len(self.counts))]
        holding = books.open(reserve, [Tokens(0)] * len(reserve), keeps_windows=False)
        assert holding is not None
        for group, pages in enumerate(reserve):
            taken = books.cover(holding, group, Tokens(10_000), surplus=False)
            assert len(taken) == pages
        worker.plan += 1
        books.withdraw(holding, worker.plan)

    @rule(which=st.integers(0, 20), less=st.lists(st.integers(0, 4), min_size=3, max_size=3))
    @precondition(lambda self: any(r.settled >= len(r.prompt) for r in self.worker.rows))
    def lower(self, which: int, less: list[int]) -> None:
        """A row that is past its prompt gives up a part of its reserve, and then goes."""
        over = [row for row in self.worker.rows if row.settled >= len(row.prompt)]
        row = over[which % len(over)]
        reserve = [
            Pages(max(0, pages - few))
            for pages, few in zip(row.holding.reserve, less, strict=False)
        ]
        self.worker.books.lower(row.holding, reserve)
        self.worker.books.check()
        self.worker.books.close(row.holding)
        self.worker.books.check()
        self.worker.withdraw(row)

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        if hasattr(self, "worker"):
            self.worker.check()

    def teardown(self) -> None:
        """All promises can be kept together; then everything comes back."""
        if not hasattr(self, "worker"):
            return
        worker, books = self.worker, self.worker.books
        for row in worker.rows:
            for group in range(len(self.counts)):
                lacking = row.holding.lacks(group)
                taken = books.cover(row.holding, group, Tokens(10_000), surplus=False)
                assert len(taken) == lacking
        worker.books.check()
        for row in list(worker.rows):
            worker.withdraw(row)
        worker.complete(worker.plan)
        worker.check()
        assert books.is_idle and not books.is_draining
        assert [books.available(group) for group in range(len(self.counts))] == self.counts
        books.evict_all()
        worker.check()
        assert [pool.free_count for pool in books.pools] == self.counts


CacheMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=50, deadline=None, derandomize=True
)
TestCacheMachine = CacheMachine.TestCase
