"""Where the layers of one group write and read KV in one launch: indices, computed once.

Segments of one token (decode) are put into buckets of similar page counts, and padded within
a bucket, so that one long row does not make the others pad. Longer segments (prefill) stand
alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tidegate.kvcache.layout import Group, Reach, Tokens
from tidegate.kvcache.page_store import TORCH_DTYPES

Ints = npt.NDArray[np.int64]

# A bucket takes rows down to this share of its longest row's pages, or this many pages less.
BUCKET_FILL_MIN = 0.75
BUCKET_SLACK_PAGES = 4
# The gathered keys of a bucket stay within this, so that they stay in the CPU's cache.
BUCKET_KEYS_MAX = 16 * 1024


@dataclass(frozen=True, slots=True)
class GroupSegments:
    """One group's side of a launch's segments, in order.

    Segment i has `counts[i]` tokens from position `starts[i]` on; `tables[i]` are its page
    ids, of which the first is the page with index `first_pages[i]`.
    """

    starts: Ints
    counts: Ints
    first_pages: Ints
    tables: Sequence[Ints]


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Rows of one token each, padded to `page_count` pages.

    `rows` [B]: their tokens' indices in the launch. `pages` [B * page_count]: page ids, padded
    with pages of the row itself. `mask` [B, 1, 1, page_count * page_tokens]: 0 where the query
    may look, -inf elsewhere. `unused`: those places again, as indices into the flattened
    [B * page_count * page_tokens]; what is there may be NaN.
    """

    rows: torch.Tensor
    pages: torch.Tensor
    page_count: int
    mask: torch.Tensor
    unused: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """One segment of several tokens: `count` from the launch's token `first_token` on, at
    positions from `start`. It reads the keys from position `first_key` on, which lie in
    `pages` after `skip` slots of the first one.
    """

    first_token: int
    count: int
    start: int
    first_key: int
    skip: int
    pages: torch.Tensor

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """`write_pages` and `write_slots` [tokens]: where each token's KV goes."""

    reach: Reach
    page_tokens: int
    write_pages: torch.Tensor
    write_slots: torch.Tensor
    decode: tuple[DecodeBucket, ...]
    prefill: tuple[PrefillPiece, ...]


def plan_group(group: Group, segments: GroupSegments, device: torch.device) -> GroupPlan:
    """Indices for a group whose tables cover all that its segments read and write."""
    starts, counts = segments.starts, segments.counts
    page_tokens = int(group.page_tokens)
    first_tokens = np.cumsum(counts) - counts
    first_keys = np.array([group.first_needed(Tokens(n)) for n in starts.tolist()], np.int64)
    # Where the page with index 0 of each segment would be in the concatenated tables.
    sizes = np.array([len(table) for table in segments.tables], np.int64)
    origins = np.cumsum(sizes) - sizes - segments.first_pages
    table = np.concatenate(segments.tables)

    positions: Ints = np.arange(counts.sum()) + np.repeat(starts - first_tokens, counts)
    write_pages = table[np.repeat(origins, counts) + positions // page_tokens]

    low_pages = first_keys // page_tokens
    page_counts = (starts + counts - 1) // page_tokens + 1 - low_pages
    single = np.flatnonzero(counts == 1)
    buckets: list[DecodeBucket] = []
    for members in _buckets(single, page_counts, page_tokens):
        width = int(page_counts[members].max())
        steps = np.minimum(np.arange(width), page_counts[members, None] - 1)
        page_ids = table[(origins + low_pages)[members, None] + steps]
        base = low_pages[members, None] * page_tokens
        keys = np.arange(width * page_tokens)
        used = (keys >= first_keys[members, None] - base) & (
            keys <= starts[members, None] - base
        )
        mask = np.where(used, np.float32(0), np.float32(-np.inf))[:, None, None]
        buckets.append(
            DecodeBucket(
                rows=on_device(first_tokens[members], device),
                pages=on_device(page_ids.reshape(-1), device),
                page_count=width,
                mask=on_device(mask, device).to(TORCH_DTYPES[group.tensors[0].dtype]),
                unused=on_device(np.flatnonzero(~used), device),
            )
        )
    pieces: list[PrefillPiece] = []
    for i in np.flatnonzero(counts > 1).tolist():
        low = int(origins[i] + low_pages[i])
        pieces.append(
            PrefillPiece(
                first_token=int(first_tokens[i]),
                count=int(counts[i]),
                start=int(starts[i]),
                first_key=int(first_keys[i]),
                skip=int(first_keys[i] - low_pages[i] * page_tokens),
                pages=on_device(table[low : low + int(page_counts[i])], device),
            )
        )
    return GroupPlan(
        reach=group.reach,
        page_tokens=page_tokens,
        write_pages=on_device(write_pages, device),
        write_slots=on_device(positions % page_tokens, device),
        decode=tuple(buckets),
        prefill=tuple(pieces),
    )


def _buckets(members: Ints, page_counts: Ints, page_tokens: int) -> Iterator[Ints]:
    """Split `members` into lists of similar page counts, longest first, ties in order."""
    order = members[np.argsort(-page_counts[members], kind="stable")]
    first = 0
    for i in range(1, len(order) + 1):
        longest = int(page_counts[order[first]])
        if i < len(order):
            least = min(longest * BUCKET_FILL_MIN, longest - BUCKET_SLACK_PAGES)
            fits = (i - first + 1) * longest * page_tokens <= BUCKET_KEYS_MAX
            if fits and page_counts[order[i]] >= least:
                continue
        yield order[first:i]
        first = i


def on_device(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    # from_numpy needs memory of its own, in order.
    # torch's stub for from_numpy lacks its argument type.
    tensor = torch.from_numpy(np.ascontiguousarray(values))  # pyright: ignore[reportUnknownMemberType]
    return tensor.to(device)
