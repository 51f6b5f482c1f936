"""The tree of cached units: which pages may stay, and what goes with a page that goes.

A *node* stands for one unit of a prompt; its key is the chained hash of the prompt up to the
unit's end, so its parent stands for the unit before. A group is *whole* when a hit needs all
its pages from position 0 on, and *rolling* when it needs those of the window before the hit
only. A node has all its pages of the whole groups. Of each rolling group it has a *part*: the
pages from some offset to the unit's end, or none.

A node is *open* when the boundary at its end can be hit. What is kept is what open nodes need:

1. A leaf of the tree is open. So whole pages are there only above boundaries that can be hit.
2. Of a rolling group exactly those pages are kept that some open node needs. Below an open
   node another one needs only its own unit in addition. So open nodes come in stretches, and
   only at the top of a stretch is all that is needed counted out, by a *mark*. A stretch that
   loses its top goes on with the next node, to which the mark moves.
3. Boundaries that were hit, or at which a prompt ended, have a *firm* mark of their own. Pages
   that only others need are *loose*: the first to go.

Without whole groups there is no use for nodes without pages. They go, and what is below them
is found by its key all the same.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from tidegate.kvcache.layout import PageId
from tidegate.kvcache.pool import HoldingId
from tidegate.kvcache.prefix_node import Mark, Node, Part, UnitHash
from tidegate.kvcache.units import GroupUnits


class PrefixTree:
    """Nodes by key. `left` is told of each page that leaves, with the group's index;
    `changed` of each part that may have another first page, or be loose now; and `bared` of
    each node with whole pages that has lost a child."""

    def __init__(
        self,
        groups: Sequence[GroupUnits],
        is_whole: Sequence[bool],
        left: Callable[[int, PageId], None],
        changed: Callable[[Part], None],
        bared: Callable[[Node], None],
    ) -> None:
        self.nodes: dict[UnitHash, Node] = {}
        self.whole_groups = [index for index, whole in enumerate(is_whole) if whole]
        self.rolling_groups = [index for index, whole in enumerate(is_whole) if not whole]
        self.rolling = [groups[index] for index in self.rolling_groups]
        self._left = left
        self._changed = changed
        self._bared = bared
        self._emptied: list[Node] = []  # Nodes to be pruned, without whole groups.

    def is_linked(self, node: Node) -> bool:
        return self.nodes.get(node.key) is node

    def add(
        self, key: UnitHash, unit: int, parent: Node | None, whole: list[tuple[PageId, ...]]
    ) -> Node:
        """A new node without rolling pages. In the end a node at or below it must be open."""
        assert key not in self.nodes
        node = self.nodes[key] = Node(key, unit, whole, self.rolling)
        if parent is not None:
            self.link(node, parent)
        return node

    def link(self, node: Node, parent: Node) -> None:
        """Put a node without a parent where it belongs."""
        assert node.parent is None and node.unit == parent.unit + 1
        node.parent = parent
        parent.children[node.key] = node
        self._join_stretch(node)

    def lacking(self, node: Node) -> list[tuple[Part, int]]:
        """Parts that must have more pages before the node can be opened, each with the offset
        from which on; the pages above its parent's need are not asked for if that is open."""
        lacking: list[tuple[Part, int]] = []
        for index, group in enumerate(self.rolling):
            needed, at = group.needed_from(node.unit), node
            while needed < group.first_page(at.unit + 1):
                offset = max(0, needed - group.first_page(at.unit))
                if at.parts[index].kept_from > offset:
                    lacking.append((at.parts[index], offset))
                if at.is_below_open or group.first_page(at.unit) <= needed:
                    break
                assert at.parent is not None, "a hit needs units that are not here"
                at = at.parent
        return lacking

    def keep(self, part: Part, ids: tuple[PageId, ...]) -> None:
        """Have these pages, up to the unit's end, instead of the fewer that the part has."""
        assert len(ids) > len(part.ids)
        for page in part.ids:
            self._left(self.rolling_groups[part.index], page)
        part.ids = ids

    def open(self, node: Node) -> None:
        """The boundary can be hit: what it needs is here."""
        assert not node.is_open
        node.is_open = True
        if not node.is_below_open:
            self._place_mark(node)
        for child in node.children.values():
            self._join_stretch(child)

    def make_firm(self, node: Node, owner: HoldingId | None) -> Mark:
        """An open node gets a firm mark, of which the owner, if any, may dispose."""
        assert node.is_open
        mark = node.mark or self._place_mark(node)
        mark.is_firm, mark.owner = True, owner
        return mark

    def make_loose(self, mark: Mark) -> None:
        """The boundary can be hit as before, but its pages are among the first to go."""
        node = mark.node
        assert node is not None
        mark.is_firm, mark.owner = False, None
        if node.is_below_open:
            self._strip(mark)
        else:
            self._tell_changed(mark)

    def advance(self, mark: Mark, path: Sequence[Node]) -> None:
        """Move a firm mark down a path of nodes, to the last of them, which is open."""
        node = mark.node
        assert node is not None and path[0].parent is node and path[-1].mark is None
        if not node.is_below_open:
            self.make_firm(path[-1], mark.owner)
            self.make_loose(mark)
            return
        self._move(mark, path)

    def shed(self, part: Part) -> None:
        """Let the part's first page go. What needs it can be hit no more."""
        page = part.ids[0]
        while part.ids and part.ids[0] == page:
            node: Node | None = part.node
            if not part.node.is_open:
                first = part.kept_from
                node = next(m.node for m, offset in part.covers.items() if offset <= first)
            assert node is not None
            self._close(node)
            self.prune(node)
            while self._emptied:
                self.prune(self._emptied.pop())

    def cut(self, node: Node) -> None:
        """Let the node go, with all below it."""
        lowest = node
        while self.is_linked(node):
            while lowest.children:
                lowest = next(iter(lowest.children.values()))
            parent = lowest.parent
            self._retreat(lowest)
            self._close(lowest)
            self.prune(lowest)
            lowest = parent if parent is not None and self.is_linked(parent) else node

    def prune(self, node: Node) -> None:
        """Let a node go if there is no use for it, and then those above it."""
        at: Node | None = node
        while at is not None and self.is_linked(at) and not at.is_open:
            if at.children if self.whole_groups else any(part.ids for part in at.parts):
                return
            parent = at.parent
            self._remove(at)
            at = parent

    def check(self) -> None:
        """Assert that the rules hold."""
        for key, node in self.nodes.items():
            assert node.key == key and len(node.whole) == len(self.whole_groups)
            assert node.children or node.is_open, "a leaf that cannot be hit"
            if self.whole_groups:
                assert (node.parent is None) == (node.unit == 0), "a gap in a path"
            else:
                assert any(part.ids for part in node.parts), "a node without pages"
            for child in node.children.values():
                assert child.parent is node and self.is_linked(child)
            for part in node.parts:
                assert part.kept_from == part.needed_from, "pages that are not needed"
                assert all(node in mark.chains[part.index] for mark in part.covers)
            if node.mark is not None:
                assert node.mark.node is node and (node.mark.is_firm or not node.is_below_open)
                self._check_mark(node.mark, node)
            elif node.is_open:
                assert node.is_below_open, "a stretch without a mark at its top"

    def _check_mark(self, mark: Mark, node: Node) -> None:
        for index, (group, chain) in enumerate(zip(self.rolling, mark.chains, strict=True)):
            pages = [
                group.first_page(each.unit) + offset
                for each in chain
                for offset in range(each.parts[index].covers[mark], group.page_count)
            ]
            end = group.first_page(node.unit + 1)
            assert pages == list(range(group.needed_from(node.unit), end))
            assert all(below.parent is above for above, below in pairwise(chain))

    def _join_stretch(self, node: Node) -> None:
        """What is below an open node needs no mark that is not firm."""
        if node.is_below_open and node.mark is not None and not node.mark.is_firm:
            self._strip(node.mark)

    def _close(self, node: Node) -> None:
        """The boundary can be hit no more. If its stretch goes on, its mark moves down."""
        node.is_open = False
        mark = node.mark
        heirs = [each for each in node.children.values() if each.is_open and each.mark is None]
        if mark is not None:
            mark.is_firm, mark.owner = False, None
            if heirs:
                self._move(mark, [heirs.pop()])
            else:
                self._strip(mark)
        for heir in heirs:
            self._place_mark(heir)
        for part in node.parts:
            self._trim(part)

    def _retreat(self, leaf: Node) -> None:
        """A leaf is about to go: its firm mark moves up by one if that can be hit as well."""
        mark, parent = leaf.mark, leaf.parent
        if mark is None or not mark.is_firm or parent is None or not parent.is_open:
            return
        mark.owner = None
        if parent.mark is not None:
            parent.mark.is_firm = True
            return
        leaf.mark = None
        mark.node, parent.mark = parent, mark
        for index, chain in enumerate(mark.chains):
            if chain and chain[-1] is leaf:
                del chain.pop().parts[index].covers[mark]
            self._fit(mark, index)

    def _place_mark(self, node: Node) -> Mark:
        assert node.mark is None
        mark = node.mark = Mark(node)
        for index in range(len(self.rolling)):
            self._fit(mark, index)
        return mark

    def _move(self, mark: Mark, path: Sequence[Node]) -> None:
        """Down a path that begins below the mark's node."""
        assert mark.node is not None
        mark.node.mark = None
        mark.node, path[-1].mark = path[-1], mark
        for index, chain in enumerate(mark.chains):
            for node in path:
                node.parts[index].covers[mark] = 0
                chain.append(node)
            self._fit(mark, index)

    def _fit(self, mark: Mark, index: int) -> None:
        """Let the mark count out exactly what a hit of its node needs of a rolling group.

        The chain ends at the mark's node, unless it is empty.
        """
        group, chain, node = self.rolling[index], mark.chains[index], mark.node
        assert node is not None
        needed = group.needed_from(node.unit)
        is_empty = needed == group.first_page(node.unit + 1)
        former = chain[0].parts[index] if chain else None
        if former is not None:
            former.covers[mark] = 0
        while chain and (is_empty or group.first_page(chain[0].unit + 1) <= needed):
            part = chain.popleft().parts[index]
            del part.covers[mark]
            self._trim(part)
        if is_empty:
            return
        while not chain or group.first_page(chain[0].unit) > needed:
            above = chain[0].parent if chain else node
            assert above is not None
            above.parts[index].covers[mark] = 0
            chain.appendleft(above)
        top = chain[0].parts[index]
        top.covers[mark] = needed - group.first_page(chain[0].unit)
        assert top.kept_from <= top.covers[mark], "a hit needs a page that is not here"
        self._trim(top)

    def _strip(self, mark: Mark) -> None:
        node = mark.node
        assert node is not None and node.mark is mark
        mark.node = node.mark = None
        for index, chain in enumerate(mark.chains):
            while chain:
                part = chain.pop().parts[index]
                del part.covers[mark]
                self._trim(part)

    def _tell_changed(self, mark: Mark) -> None:
        for index, chain in enumerate(mark.chains):
            for node in chain:
                self._changed(node.parts[index])

    def _trim(self, part: Part) -> None:
        """Let those pages of the part go that no open node needs."""
        count = part.needed_from - part.kept_from
        for page in part.ids[:count]:
            self._left(self.rolling_groups[part.index], page)
        part.ids = part.ids[count:]
        if part.ids:
            self._changed(part)
        elif count and not self.whole_groups:
            self._emptied.append(part.node)

    def _remove(self, node: Node) -> None:
        assert node.mark is None and not any(part.ids for part in node.parts)
        del self.nodes[node.key]
        for group, pages in zip(self.whole_groups, node.whole, strict=True):
            for page in pages:
                self._left(group, page)
        for child in node.children.values():
            child.parent = None
        if node.parent is not None:
            parent, node.parent = node.parent, None
            del parent.children[node.key]
            if self.whole_groups:
                self._bared(parent)
