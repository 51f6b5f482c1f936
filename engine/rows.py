"""The row table: applies plan operations to rows, and says what the next launch feeds.

A row's life:

1. `Start` makes it. Positions below its `position` are settled; it knows the tokens from
   there on. With exactly one token known, and that one sampled (`output_index` above 0), it
   *decodes*: every launch feeds that token. Otherwise it waits for `Chunk`s.
2. A `Chunk` feeds the known tokens up to `until`, in a launch with others of its turn. One that
   samples makes token `output_index`, with which the row decodes from then on.
3. A row that decodes feeds position q if its pages cover q in every group. Without a page it
   is *starved*, and sits out. It sits out, too, from the position on that a `Limit` names,
   until another one lets it go on.
4. After a sampled token it ends at an end token, a stop id or its own limit. `Stop` forgets it
   at any time; so does a fault.

An operation that no correct scheduler sends costs that row a fault; the others go on. One
that names no row is ignored and counted: the row may have ended while it was under way.
"""

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from tidegate.engine.held_pages import HeldPages, HeldRun
from tidegate.engine.row_start import BadOperation, Ids, checked_ids, checked_pages, read_tokens
from tidegate.ipc.protocol import (
    Chunk,
    EndReason,
    Grow,
    Limit,
    RequestId,
    Row,
    RowEnd,
    Sampling,
    Start,
    Stop,
    Trim,
    Trimmed,
    unpack_ids,
)
from tidegate.kvcache.layout import Layout, Tokens

CHUNKS_WAITING_MAX = 64

RowOperation = Start | Chunk | Grow | Limit | Trim | Stop


class RowFault(msgspec.Struct, frozen=True):
    """A row that the table has forgotten because of an error. `text` holds no tokens."""

    row: Row
    request_id: RequestId
    kind: str
    text: str


class Feed(msgspec.Struct, frozen=True):
    """A row's part of a launch: its `tokens` go to positions `start`, `start + 1`, …

    `is_chunk` tells a `Chunk`, which is reported when it is over. `output_index` is that of
    the token to sample, if `sample` is set. `pages` are the row's in each group.
    """

    row: Row
    request_id: RequestId
    start: int
    tokens: Ids
    sample: bool
    is_chunk: bool
    output_index: int
    sampling: Sampling
    pages: tuple[HeldRun, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Launch(msgspec.Struct, frozen=True):
    """What to feed now; `starved` rows could go on but for pages."""

    feeds: tuple[Feed, ...]
    starved: tuple[Row, ...]


class RowState:
    """One row. `known` are the tokens from `position` on, which is the next one to feed."""

    def __init__(self, start: Start, known: Ids, pages: tuple[HeldPages, ...]) -> None:
        self.row = start.row
        self.request_id = start.request_id
        self.position = start.position
        self.known = known
        self.output_index = start.output_index
        self.limit = start.limit
        self.sits_out_at = start.limit
        self.pages = pages
        self.sampling = start.sampling
        self.stop_ids = frozenset(unpack_ids(start.stop_ids))
        self.ignore_eos = start.ignore_eos
        self.chunks: deque[Chunk] = deque()

    @property
    def decodes(self) -> bool:
        return len(self.known) == 1 and self.output_index > 0

    @property
    def known_end(self) -> int:
        return self.position + len(self.known)

    @property
    def covered_to(self) -> int:
        """One past the last position that the pages cover in every group."""
        return min(pages.held_to for pages in self.pages)


class RowTable:
    """All rows of a worker, in the order of their starts."""

    def __init__(
        self,
        layout: Layout,
        page_counts: Sequence[int],
        row_count: int,
        vocab_size: int,
        eos_ids: Sequence[int],
    ) -> None:
        self._layout = layout
        self._page_counts = tuple(page_counts)
        self._row_count = row_count
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._rows: dict[Row, RowState] = {}
        self._faults: list[RowFault] = []
        self._trimmed: list[Trimmed] = []
        self.ignored_count = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: Row) -> bool:
        return row in self._rows

    def apply(self, operation: RowOperation) -> None:
        """Apply one operation; what is wrong with it becomes a fault of its row."""
        if isinstance(operation, Start):
            self._start(operation)
            return
        state = self._rows.get(operation.row)
        if state is None:
            self.ignored_count += not isinstance(operation, Stop)
            return
        try:
            match operation:
                case Chunk():
                    self._add_chunk(state, operation)
                case Grow():
                    self._grow(state, operation)
                case Limit():
                    self._set_limit(state, operation)
                case Trim():
                    self._trim(state, operation)
                case Stop():
                    del self._rows[operation.row]
        except BadOperation as error:
            self.fault(operation.row, "bad_plan", str(error))

    def next_launch(self) -> Launch:
        """Every chunk of the lowest turn (one a row) and every row that decodes.

        The same feeds come again until they are settled or their rows forgotten.
        """
        feeds: list[Feed] = []
        starved: list[Row] = []
        heads = (state.chunks[0].turn for state in self._rows.values() if state.chunks)
        turn = min(heads, default=0)
        for state in tuple(self._rows.values()):
            if state.chunks:
                if state.chunks[0].turn > turn:
                    continue
                feed = self._feed_chunk(state, state.chunks[0])
                if feed is not None:
                    feeds.append(feed)
            elif not state.decodes or state.position >= state.sits_out_at:
                continue
            elif state.covered_to > state.position:
                feeds.append(_feed(state, state.position + 1, sample=True, is_chunk=False))
            else:
                starved.append(state.row)
        return Launch(tuple(feeds), tuple(starved))

    def settle(self, feed: Feed, token: int | None) -> RowEnd | None:
        """The feed is over and, if it samples, gave `token`. Returns the row's end, if any.

        A row that was forgotten in the meantime is left alone.
        """
        assert (token is not None) == feed.sample
        state = self._rows.get(feed.row)
        if state is None or state.request_id != feed.request_id:
            return None
        assert feed.start == state.position
        state.known = state.known[len(feed.tokens) :]
        state.position = feed.end
        if feed.is_chunk:
            state.chunks.popleft()
        for pages in state.pages:
            pages.forget_below(Tokens(state.position))
        if token is None:
            return None
        assert len(state.known) == 0
        state.known = (token,)
        state.output_index += 1
        reason = self._end_reason(state, token)
        if reason is None:
            return None
        del self._rows[feed.row]
        return RowEnd(feed.row, reason)

    def fault(self, row: Row, kind: str, text: str) -> None:
        """Forget a row because of an error; `take_faults` tells it."""
        state = self._rows.pop(row)
        self._faults.append(RowFault(row, state.request_id, kind, text))

    @property
    def has_news(self) -> bool:
        """There is a fault to take, or something that a row has given up."""
        return bool(self._faults or self._trimmed)

    def take_faults(self) -> tuple[RowFault, ...]:
        """The faults since the last call."""
        faults, self._faults = tuple(self._faults), []
        return faults

    def take_trimmed(self) -> tuple[Trimmed, ...]:
        """What rows have given up since the last call."""
        trimmed, self._trimmed = tuple(self._trimmed), []
        return trimmed

    def _start(self, start: Start) -> None:
        try:
            if start.row in self._rows:
                # Later operations could mean either request, so neither can go on.
                self.fault(start.row, "bad_plan", f"row {start.row} was started again")
                raise BadOperation(f"row {start.row} is in use")
            if not 0 <= start.row < self._row_count:
                raise BadOperation(f"row {start.row} is not in 0 to {self._row_count - 1}")
            if start.position >= start.limit or start.output_index < 0:
                raise BadOperation(
                    f"a row at position {start.position} with output index "
                    f"{start.output_index} needs a limit above its position, not {start.limit}"
                )
            known = read_tokens(start, self._vocab_size)
            pages = checked_pages(start, self._layout, self._page_counts)
            self._rows[start.row] = RowState(start, known, pages)
        except BadOperation as error:
            self._faults.append(RowFault(start.row, start.request_id, "bad_plan", str(error)))

    def _add_chunk(self, state: RowState, chunk: Chunk) -> None:
        if len(state.chunks) >= CHUNKS_WAITING_MAX:
            raise BadOperation(f"more than {CHUNKS_WAITING_MAX} chunks wait")
        begin = state.chunks[-1].until if state.chunks else state.position
        if not begin < chunk.until <= state.known_end:
            raise BadOperation(
                f"a chunk until {chunk.until} does not end after position {begin} and by "
                f"{state.known_end}, where the row's tokens end"
            )
        if chunk.sample and chunk.until != state.known_end:
            raise BadOperation(
                f"a chunk until {chunk.until} cannot sample: the row's tokens end at "
                f"{state.known_end}"
            )
        state.chunks.append(chunk)

    def _grow(self, state: RowState, grow: Grow) -> None:
        if not 0 <= grow.group < len(state.pages):
            raise BadOperation(f"the layout has no group {grow.group}")
        state.pages[grow.group].append(checked_ids(grow.ids, self._page_counts[grow.group]))

    def _set_limit(self, state: RowState, limit: Limit) -> None:
        state.sits_out_at = limit.limit

    def _trim(self, state: RowState, trim: Trim) -> None:
        waiting = state.chunks[-1].until if state.chunks else 0
        keep_to = Tokens(max(trim.until, state.position + 1, waiting))
        counts = tuple(pages.forget_beyond(keep_to) for pages in state.pages)
        self._trimmed.append(Trimmed(state.row, counts))

    def _feed_chunk(self, state: RowState, chunk: Chunk) -> Feed | None:
        """None, and a fault, for a chunk that goes beyond the row's pages or its limit."""
        until_max = min(state.covered_to, state.limit)
        if chunk.until > until_max:
            self.fault(
                state.row,
                "bad_plan",
                f"a chunk until {chunk.until} goes beyond {until_max}: the pages cover "
                f"{state.covered_to} positions and the limit is {state.limit}",
            )
            return None
        return _feed(state, chunk.until, sample=chunk.sample, is_chunk=True)

    def _end_reason(self, state: RowState, token: int) -> EndReason | None:
        if token in self._eos_ids and not state.ignore_eos:
            return EndReason.END_TOKEN
        if token in state.stop_ids:
            return EndReason.STOP_ID
        if state.position >= state.limit:
            return EndReason.LENGTH
        return None


def _feed(state: RowState, end: int, *, sample: bool, is_chunk: bool) -> Feed:
    tokens = state.known[: end - state.position]
    if not isinstance(tokens, np.ndarray):
        tokens = tuple(tokens)
    return Feed(
        row=state.row,
        request_id=state.request_id,
        start=state.position,
        tokens=tokens,
        sample=sample,
        is_chunk=is_chunk,
        output_index=state.output_index,
        sampling=state.sampling,
        pages=tuple(pages.run for pages in state.pages),
    )
