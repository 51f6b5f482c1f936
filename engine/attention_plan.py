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

Ints = npt.NDArray[np.int64]

# A bucket takes rows down to this share of its longest row's pages, or this many pages less.
BUCKET_FILL_MIN = 0.75
BUCKET_SLACK_PAGES = 4
# What a bucket gathers of one tensor. On a CPU it has to stay in the cache.
BUCKET_BYTES_MAX = {"cpu": 4 * 1024 * 1024, "cuda": 256 * 1024 * 1024}


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """B rows of one token each, padded to P pages, which hold T = P * page_tokens slots.

    `rows` [B]: their tokens' indices in the launch. `pages` [B * P]: page ids, padded with
    pages of the row itself. `mask` [B, 1, T], float32: 0 where the query may look, -inf
    elsewhere. `unused`: those places again, as indices into the flattened [B * T]; there may
    be NaN there.
    """

    rows: torch.Tensor
    pages: torch.Tensor
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
    write_pages: torch.Tensor
    write_slots: torch.Tensor
    decode: tuple[DecodeBucket, ...]
    prefill: tuple[PrefillPiece, ...]


class GroupSegments:
    """One group's side of a launch's segments: segment i feeds `counts[i]` tokens from
    position `starts[i]` on. In `table`, which holds page ids, `origins[i]` is where its page
    with index 0 is, or would be; it covers all that the segment reads and writes.
    """

    def __init__(
        self, group: Group, starts: Ints, counts: Ints, table: Ints, origins: Ints
    ) -> None:
        self.group = group
        self.page_tokens = int(group.page_tokens)
        # Of the largest tensor: what a layer gathers of a page.
        self.tensor_bytes = max(
            spec.entry_bytes * group.entry_count(spec) for spec in group.tensors
        )
        self.starts = starts
        self.counts = counts
        self.table = table
        self.origins = origins
        self.first_tokens: Ints = counts.cumsum() - counts
        self.first_keys: Ints = np.array(
            [group.first_needed(Tokens(n)) for n in starts.tolist()], np.int64
        )
        self.low_pages: Ints = self.first_keys // self.page_tokens
        self.page_counts: Ints = (starts + counts - 1) // self.page_tokens + 1 - self.low_pages

    @classmethod
    def of_tables(
        cls,
        group: Group,
        starts: Ints,
        counts: Ints,
        first_pages: Sequence[int],
        tables: Sequence[Ints],
    ) -> "GroupSegments":
        """Segments with a table each: `tables[i]` are page ids from `first_pages[i]` on."""
        sizes: Ints = np.array([len(table) for table in tables], np.int64)
        origins: Ints = sizes.cumsum() - sizes - np.array(first_pages, np.int64)
        return cls(group, starts, counts, np.concatenate(tables), origins)

    def tokens_alone(self, tokens: Ints) -> "GroupSegments":
        """Some of the launch's tokens, each as a segment of its own that attends alone."""
        ends = self.first_tokens + self.counts
        owners = np.searchsorted(ends, tokens, side="right")
        starts: Ints = self.starts[owners] + tokens - self.first_tokens[owners]
        return GroupSegments(
            self.group, starts, np.ones_like(starts), self.table, self.origins[owners]
        )

    def plan(self, device: torch.device) -> GroupPlan:
        """The indices of a launch of these segments."""
        within = np.arange(int(self.counts.sum())) - np.repeat(self.first_tokens, self.counts)
        positions: Ints = np.repeat(self.starts, self.counts) + within
        owners = np.repeat(np.arange(len(self.starts)), self.counts)
        write_pages, write_slots = self.places(owners, positions)
        return GroupPlan(
            reach=self.group.reach,
            write_pages=on_device(write_pages, device),
            write_slots=on_device(write_slots, device),
            decode=tuple(
                self._bucket(members, device)
                for members in self._split(BUCKET_BYTES_MAX[device.type])
            ),
            prefill=tuple(
                self._piece(number, device)
                for number in np.flatnonzero(self.counts > 1).tolist()
            ),
        )

    def places(
        self, owners: Ints, positions: Ints, tokens_per_entry: int = 1
    ) -> tuple[Ints, Ints]:
        """Page ids and the numbers of entries within them, for `positions` of the segments
        `owners`, in a tensor with one entry for so many tokens. Of the same shape, broadcast.
        """
        pages = self.table[self.origins[owners] + positions // self.page_tokens]
        return pages, positions % self.page_tokens // tokens_per_entry

    def _split(self, byte_count_max: int) -> Iterator[Ints]:
        """The segments of one token in lists of similar page counts, longest first."""
        single = np.flatnonzero(self.counts == 1)
        order = single[np.argsort(-self.page_counts[single], kind="stable")]
        counts: list[int] = self.page_counts[order].tolist()
        first = 0
        for i in range(1, len(order) + 1):
            longest = counts[first]
            if i < len(order):
                least = min(longest * BUCKET_FILL_MIN, longest - BUCKET_SLACK_PAGES)
                byte_count = (i - first + 1) * longest * self.tensor_bytes
                if counts[i] >= least and byte_count <= byte_count_max:
                    continue
            yield order[first:i]
            first = i

    def _bucket(self, members: Ints, device: torch.device) -> DecodeBucket:
        counts = self.page_counts[members, None]
        width = int(counts.max())
        # The last page of a short row stands in for the pages that it lacks.
        steps = np.minimum(np.arange(width), counts - 1)
        ids = self.table[(self.origins + self.low_pages)[members, None] + steps]
        slots = self.low_pages[members, None] * self.page_tokens + np.arange(
            width * self.page_tokens
        )
        used = (slots >= self.first_keys[members, None]) & (slots <= self.starts[members, None])
        mask = np.where(used, np.float32(0), np.float32(-np.inf))[:, None]
        return DecodeBucket(
            rows=on_device(self.first_tokens[members], device),
            pages=on_device(ids.reshape(-1), device),
            mask=on_device(mask, device),
            unused=on_device(np.flatnonzero(~used), device),
        )

    def _piece(self, number: int, device: torch.device) -> PrefillPiece:
        first_key = int(self.first_keys[number])
        low_page = int(self.low_pages[number])
        first = int(self.origins[number]) + low_page
        return PrefillPiece(
            first_token=int(self.first_tokens[number]),
            count=int(self.counts[number]),
            start=int(self.starts[number]),
            first_key=first_key,
            skip=first_key - low_page * self.page_tokens,
            pages=on_device(self.table[first : first + int(self.page_counts[number])], device),
        )


def on_device(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array as a tensor; on the CPU it shares the array's memory if it is contiguous."""
    array = np.ascontiguousarray(values)
    # The ignore: torch leaves the argument's type open.
    return torch.from_numpy(array).to(device)  # pyright: ignore[reportUnknownMemberType]
