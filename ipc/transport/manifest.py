"""Checks a `Fetch` against both pools before a byte is copied. Nothing is ever truncated."""

import msgspec

from tidegate.ipc.protocol import Fetch, MalformedIds, PullGroup, unpack_ids
from tidegate.kvcache.geometry import Geometry
from tidegate.kvcache.layout import Group, Layout, Tokens


class ManifestError(ValueError):
    """A fetch whose counts, positions or page ids do not match the pools."""


class PageCopies(msgspec.Struct, frozen=True):
    """The pages of one group to copy: equally many source and target ids."""

    group: int
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]


def check_manifest(
    fetch: Fetch, layout: Layout, source: Geometry, target: Geometry
) -> tuple[PageCopies, ...]:
    """What to copy, for each group. Raises `ManifestError` for the first thing that is wrong.

    A group's pages, unless there are none, end with the page of position `length - 1`.
    """
    if len(fetch.groups) != len(layout.groups):
        raise ManifestError(
            f"the fetch has {len(fetch.groups)} groups, the layout {len(layout.groups)}"
        )
    if fetch.length < 1:
        raise ManifestError(f"the length is {fetch.length}, it must be at least 1")
    return tuple(
        _check_group(index, group, pull, Tokens(fetch.length), source, target)
        for index, (group, pull) in enumerate(zip(layout.groups, fetch.groups, strict=True))
    )


def _check_group(
    index: int,
    group: Group,
    pull: PullGroup,
    length: Tokens,
    source: Geometry,
    target: Geometry,
) -> PageCopies:
    try:
        source_ids, target_ids = unpack_ids(pull.source_ids), unpack_ids(pull.target_ids)
    except MalformedIds as error:
        raise ManifestError(f"group {group.name}: {error}") from error
    if len(source_ids) != len(target_ids):
        raise ManifestError(
            f"group {group.name}: {len(source_ids)} source pages for {len(target_ids)} target "
            "pages"
        )
    _check_positions(group, pull.first_position, len(source_ids), length)
    _check_ids(group, "source", source_ids, source.page_counts[index])
    _check_ids(group, "target", target_ids, target.page_counts[index])
    return PageCopies(index, source_ids, target_ids)


def _check_positions(group: Group, first_position: int, count: int, length: Tokens) -> None:
    first_page = group.page_of(Tokens(first_position))
    if first_position < 0 or group.start_of(first_page) != first_position:
        raise ManifestError(
            f"group {group.name}: position {first_position} does not begin a page of "
            f"{group.page_tokens} tokens"
        )
    end_page = group.pages(length)
    if first_page + count > end_page or (count and first_page + count != end_page):
        raise ManifestError(
            f"group {group.name}: {count} pages from page {first_page} on do not end with the "
            f"last page of {length} tokens, which is page {end_page - 1}"
        )


def _check_ids(group: Group, side: str, ids: tuple[int, ...], page_count: int) -> None:
    if ids and max(ids) >= page_count:
        raise ManifestError(
            f"group {group.name}: {side} page {max(ids)} is not in a pool of {page_count} pages"
        )
    if len(set(ids)) != len(ids):
        raise ManifestError(f"group {group.name}: a {side} page is named twice")
