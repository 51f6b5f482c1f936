"""Where the bytes of a pool lie: one buffer, group after group, page after page.

A page's bytes are contiguous, so a page moves by one copy. Within a page the tensors of the
group follow one another in the layout's order, each as [entries, *shape].
"""

from collections.abc import Sequence

import msgspec

from tidegate.kvcache.layout import Layout

GROUP_ALIGNMENT_BYTES = 4096


class Geometry(msgspec.Struct, frozen=True):
    """Byte offsets of a pool's groups, for each group in the layout's order."""

    group_offsets: tuple[int, ...]
    page_bytes: tuple[int, ...]
    page_counts: tuple[int, ...]
    byte_count: int

    def page_offset(self, group: int, page_id: int) -> int:
        assert 0 <= page_id < self.page_counts[group], (group, page_id)
        return self.group_offsets[group] + page_id * self.page_bytes[group]


def geometry(layout: Layout, page_counts: Sequence[int]) -> Geometry:
    """The one geometry that every process derives from a layout and its page counts."""
    assert len(page_counts) == len(layout.groups)
    offsets: list[int] = []
    end = 0
    for group, count in zip(layout.groups, page_counts, strict=True):
        offsets.append(end)
        end += -(-group.page_bytes * count // GROUP_ALIGNMENT_BYTES) * GROUP_ALIGNMENT_BYTES
    return Geometry(
        tuple(offsets),
        tuple(group.page_bytes for group in layout.groups),
        tuple(page_counts),
        end,
    )
