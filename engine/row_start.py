"""Checks what an operation brings for a row: its tokens, and its pages of each group.

A wrong id would make the whole launch fail, or on a GPU the process; so ids are checked
when they arrive, once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate.engine.held_pages import HeldPages
from tidegate.ipc.protocol import MalformedIds, PageRun, Start, unpack_ids
from tidegate.kvcache.layout import Group, Layout, Tokens

Ids = Sequence[int] | npt.NDArray[np.unsignedinteger[Any]]


class BadOperation(ValueError):
    """An operation that no correct scheduler sends. The text holds no tokens."""


def read_tokens(start: Start, vocab_size: int) -> Ids:
    """The tokens of `start`, at least one. Raises `BadOperation`."""
    if not start.tokens or len(start.tokens) % 4:
        raise BadOperation(f"{len(start.tokens)} bytes of tokens are no list of uint32")
    if len(start.stop_ids) % 4:
        raise BadOperation(f"{len(start.stop_ids)} bytes of stop ids are no list of uint32")
    tokens = np.frombuffer(start.tokens, "<u4")
    if int(tokens.max()) >= vocab_size:
        raise BadOperation(f"a token is not in the vocabulary, 0 to {vocab_size - 1}")
    return tokens


def checked_ids(data: bytes, page_count: int) -> tuple[int, ...]:
    """Page ids below `page_count`. Raises `BadOperation`."""
    try:
        ids = unpack_ids(data)
    except MalformedIds as error:
        raise BadOperation(str(error)) from error
    if ids and max(ids) >= page_count:
        raise BadOperation(f"page {max(ids)} is not in the pool of {page_count} pages")
    return ids


def checked_pages(
    start: Start, layout: Layout, page_counts: Sequence[int]
) -> tuple[HeldPages, ...]:
    """The row's pages in each group. Raises `BadOperation` if they are not what the settled
    positions need.
    """
    if len(start.pages) != len(layout.groups):
        raise BadOperation(
            f"a start with {len(start.pages)} page runs, for {len(layout.groups)} groups"
        )
    return tuple(
        _checked_run(start.position, group, run, count)
        for group, run, count in zip(layout.groups, start.pages, page_counts, strict=True)
    )


def _checked_run(position: int, group: Group, run: PageRun, page_count: int) -> HeldPages:
    if position < 0 or run.first_position < 0:
        raise BadOperation("a position is negative")
    first_page = group.page_of(Tokens(run.first_position))
    if group.start_of(first_page) != run.first_position:
        raise BadOperation(
            f"position {run.first_position} does not begin a page of group {group.name!r}"
        )
    held = HeldPages(group, first_page, checked_ids(run.ids, page_count))
    needed = group.first_needed(Tokens(position))
    if run.first_position > needed or (needed < position and held.held_to < position):
        raise BadOperation(
            f"a row at position {position} needs positions {needed} to {position - 1} of "
            f"group {group.name!r}, its pages cover {run.first_position} to "
            f"{held.held_to - 1}"
        )
    return held
