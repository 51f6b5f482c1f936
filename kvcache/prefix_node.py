"""What the tree of cached units consists of: nodes, their parts, and marks."""

from collections import deque
from collections.abc import Sequence

from tidegate.kvcache.layout import PageId
from tidegate.kvcache.pool import HoldingId
from tidegate.kvcache.units import GroupUnits

UnitHash = int | bytes


class Node:
    """One unit of some prompts. `whole` has the pages of each whole group.

    `is_open` says that the boundary at its end can be hit.
    """

    __slots__ = (
        "children",
        "is_open",
        "key",
        "mark",
        "parent",
        "parts",
        "stamp",
        "unit",
        "whole",
    )

    def __init__(
        self,
        key: UnitHash,
        unit: int,
        whole: list[tuple[PageId, ...]],
        rolling: Sequence[GroupUnits],
    ) -> None:
        self.key = key
        self.unit = unit
        self.whole = whole
        self.parts = [Part(self, index, group) for index, group in enumerate(rolling)]
        self.parent: Node | None = None
        self.children: dict[UnitHash, Node] = {}
        self.is_open = False
        self.mark: Mark | None = None
        self.stamp = 0  # When its whole pages were last in use.

    @property
    def is_below_open(self) -> bool:
        return self.parent is not None and self.parent.is_open


class Part:
    """A node's pages of one rolling group: those at offsets from `kept_from` on.

    `covers` has for each mark that needs some of them the first offset that it needs.
    """

    __slots__ = ("covers", "group", "ids", "index", "node", "stamp", "useful_from")

    def __init__(self, node: Node, index: int, group: GroupUnits) -> None:
        self.node = node
        self.index = index
        self.group = group
        self.ids: tuple[PageId, ...] = ()  # The last one is at the unit's end.
        self.useful_from = group.useful_from(node.unit)
        self.covers: dict[Mark, int] = {}
        self.stamp = 0  # When one of its pages was last in use.

    @property
    def kept_from(self) -> int:
        return self.group.page_count - len(self.ids)

    @property
    def needed_from(self) -> int:
        """The first offset that some hit needs; the page count if none does."""
        own = self.useful_from if self.node.is_open else self.group.page_count
        return min(own, min(self.covers.values(), default=own))

    @property
    def is_firm(self) -> bool:
        """Does a firm mark need its first page?"""
        first = self.kept_from
        return any(mark.is_firm and offset <= first for mark, offset in self.covers.items())


class Mark:
    """The pages that a hit of `node` needs, counted out; the node is None when it is gone.

    `chains` has for each rolling group the nodes with such pages, topmost first. A *firm*
    mark is on a boundary that has been hit, or where a prompt ended. `owner` is the holding
    that takes it along while its prompt runs.
    """

    __slots__ = ("chains", "is_firm", "node", "owner")

    def __init__(self, node: Node) -> None:
        self.node: Node | None = node
        self.is_firm = False
        self.owner: HoldingId | None = None
        self.chains: list[deque[Node]] = [deque() for _ in node.parts]
