"""The prefix cache of one worker: which pages a prompt finds, and which go when pages lack.

1. *Find*: a prompt comes with a chain of hashes, one for each full unit. `find` says how many
   of its tokens are cached, and which pages a row needs to go on from there. Nothing changes.
2. *Enter*: the row leases those pages. The boundary it goes on from gets a firm mark.
3. *Publish*: when a launch of the row's prompt has settled, its full units join the tree, and
   others can find them while the row still runs. A firm mark of the row's own moves on to the
   last of them; so in the end it is where the prompt ends, and boundaries before it are loose.
4. *Released*: a page whose last lease has ended is idle, and that moment is its age. So a hit
   makes younger what it uses: all whole pages of its path, but of rolling groups only the
   window before it.
5. *Evict*: of a rolling group loose pages go first, the oldest of them before others; then the
   oldest of the rest. Of whole groups the oldest leaf of the tree goes. A node that is idle
   above others on lease goes last, for it takes them along: they come from a row that ran at
   the same time as the one that published the node, with pages of its own for that unit.

A hit is shorter than its prompt, since at least one position must be fed. So a unit that ends
where the prompt ends is not published either: only longer prompts could use it, and the same
prompt, asked again, would find its end without the window before it.
"""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from tidegate.kvcache.ageing import Age, Ageing
from tidegate.kvcache.layout import All, Layout, PageId, Pages, Tail, Tokens
from tidegate.kvcache.page_table import PageTable
from tidegate.kvcache.pool import HoldingId, PagePool
from tidegate.kvcache.prefix_node import Node, Part, UnitHash
from tidegate.kvcache.prefix_row import CacheRow, Hit
from tidegate.kvcache.prefix_tree import PrefixTree
from tidegate.kvcache.units import GroupUnits, unit_tokens


class CacheStats(msgspec.Struct):
    """Counts since the worker joined. Lookups are rows that began with a chain of hashes."""

    lookup_count: int = 0
    hit_count: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0


class PrefixCache:
    """`whole_windows` says that a hit needs all window pages from position 0 on, because all
    of them are moved at the hand-off."""

    def __init__(
        self, layout: Layout, pools: Sequence[PagePool], *, whole_windows: bool
    ) -> None:
        self.unit = unit_tokens(layout)
        self.whole_windows = whole_windows
        self.is_whole = [
            isinstance(group.reach, All) or (whole_windows and group.is_window)
            for group in layout.groups
        ]
        self.has_tails = any(isinstance(group.reach, Tail) for group in layout.groups)
        self.stats = CacheStats()
        self.generation = 0
        self._pools = pools
        self._groups = [GroupUnits(group, self.unit) for group in layout.groups]
        self.tree = PrefixTree(
            self._groups, self.is_whole, self._left, self._changed, self._bared
        )
        # Who keeps each page of the cache.
        self._keepers: list[dict[PageId, Node | Part]] = [{} for _ in pools]
        self._now = 0  # Counts the times at which leases ended.
        self._nodes_by_age = Ageing(self._age_of_node)
        self._parts_by_age = [Ageing(self._age_of_part) for _ in self.tree.rolling]

    def last_boundary(self, position: Tokens) -> Tokens:
        """The last end of a unit at or before the position."""
        return Tokens(position // self.unit * self.unit)

    def cached_tokens(self, group: int) -> Tokens:
        """Positions of the group that a lookup could find, on lease or not."""
        return self._groups[group].group.start_of(Pages(len(self._keepers[group])))

    def find(self, chain: Sequence[UnitHash], prompt: Tokens) -> Hit:
        """The longest stretch of the prompt from which a row could go on; maybe nothing."""
        nodes = self.tree.nodes
        count = self._unit_count(chain, prompt)
        if self.tree.whole_groups:
            # What is above a node is there.
            count = bisect_left(range(count), True, key=lambda unit: chain[unit] not in nodes)
        while count:
            node = nodes.get(chain[count - 1])
            if node is not None and node.is_open:
                break
            gap = count - 1 if node is None else self._gap_above(chain, node)
            if gap is None:
                break  # Pages that open nodes need happen to be what this one needs.
            count = gap
        return Hit(Tokens(count * self.unit), count, chain, prompt, self.generation)

    def pages(self, hit: Hit, index: int) -> list[PageId]:
        """The pages of one group that a row leases to go on from the hit."""
        tree, pages = self.tree, list[PageId]()
        if self.is_whole[index]:
            place = tree.whole_groups.index(index)
            for key in hit.chain[: hit.unit_count]:
                pages += tree.nodes[key].whole[place]
        elif hit.unit_count:
            group, place = self._groups[index], tree.rolling_groups.index(index)
            first = group.needed_from(hit.unit_count - 1)
            for unit in range(group.unit_of(first), hit.unit_count):
                part = tree.nodes[hit.chain[unit]].parts[place]
                pages += part.ids[max(0, first - group.first_page(unit) - part.kept_from) :]
        return pages

    def enter(self, hit: Hit) -> CacheRow:
        """A row begins, whose holding has leased the pages of the hit."""
        tree, stats = self.tree, self.stats
        stats.lookup_count += 1
        stats.prompt_tokens += hit.prompt
        if not hit.unit_count:
            return CacheRow(hit, None, tree.rolling)
        stats.hit_count += 1
        stats.hit_tokens += hit.tokens
        node = tree.nodes[hit.chain[hit.unit_count - 1]]
        if not tree.whole_groups:
            self._link_path(hit.chain, node)
        if not node.is_open:
            tree.open(node)
        tree.make_firm(node, None)
        return CacheRow(hit, node, tree.rolling)

    def publish(
        self, row: CacheRow, holding: HoldingId, tables: Sequence[PageTable], settled: Tokens
    ) -> None:
        """All launches of the row up to the position `settled` are over: keep full units.

        The tables are those before pages below `settled` are given back.
        """
        tree, before = self.tree, row.settled
        rolling_tables = [tables[index] for index in tree.rolling_groups]
        offered = row.settle(tree.rolling, rolling_tables, settled)
        last = self._last_boundary(row, before, offered)
        if last is None:
            return
        path = self._grow(row, holding, tables, offered, last)
        node, mark = path[-1], row.mark
        if mark is not None and mark.owner != holding:
            mark = None  # Others have hit its boundary, or it was taken away.
        if mark is not None and node.mark is None and path[0].parent is mark.node:
            tree.advance(mark, path)
        else:
            if node.mark is None or not node.mark.is_firm:
                tree.make_firm(node, holding)
            if mark is not None:
                tree.make_loose(mark)
        if not tree.whole_groups:
            for each in path:
                tree.prune(each)
        row.node, row.unit_count, row.mark = node, last + 1, node.mark

    def released(self, group: int, pages: Sequence[PageId]) -> None:
        """A lease of these pages has ended, or the last launch that read them."""
        pool, keepers, whole_groups = (
            self._pools[group],
            self._keepers[group],
            self.tree.whole_groups,
        )
        if group in whole_groups[1:]:
            return  # A node's whole pages are leased together: one group stands for all.
        self._now += 1
        for page in pages:
            keeper = keepers.get(page)
            if keeper is None or keeper.stamp == self._now or not pool.is_idle(page):
                continue
            keeper.stamp = self._now
            if isinstance(keeper, Part):
                self._changed(keeper)
            else:
                self._bared(keeper)

    def evict(self, group: int) -> None:
        """Free at least one idle page of the group; there must be one."""
        tree = self.tree
        if self.is_whole[group]:
            tree.cut(self._nodes_by_age.take_oldest())
        else:
            index = tree.rolling_groups.index(group)
            tree.shed(self._parts_by_age[index].take_oldest())

    def check(self) -> None:
        """Assert that the tree holds its rules, and that it has the pages that are attached."""
        self.tree.check()
        found: list[dict[PageId, Node | Part]] = [{} for _ in self._pools]
        for node in self.tree.nodes.values():
            for group, pages in zip(self.tree.whole_groups, node.whole, strict=True):
                found[group].update(dict.fromkeys(pages, node))
            for group, part in zip(self.tree.rolling_groups, node.parts, strict=True):
                found[group].update(dict.fromkeys(part.ids, part))
        assert found == self._keepers, "a page of the tree is not accounted for"
        for pool, keepers in zip(self._pools, self._keepers, strict=True):
            assert pool.attached_count == len(keepers)

    def _unit_count(self, chain: Sequence[UnitHash], prompt: Tokens) -> int:
        """How many units of the prompt a hit could cover at most."""
        return min(len(chain), (prompt - 1) // self.unit)

    def _link_path(self, chain: Sequence[UnitHash], node: Node) -> None:
        """Put the nodes together that a hit of the node needs; not all of them always are."""
        while node.unit:
            above = node.parent or self.tree.nodes.get(chain[node.unit - 1])
            if above is None:
                return
            if node.parent is None:
                self.tree.link(node, above)
            node = above

    def _gap_above(self, chain: Sequence[UnitHash], node: Node) -> int | None:
        """A unit that lacks pages which a hit of the node needs, and so do hits that end
        between that unit and the node; None if the node can be hit.

        Without whole groups nothing is kept for a hit that needs nothing: it is none.
        """
        tree = self.tree
        needs_pages = bool(tree.whole_groups)
        for index, group in enumerate(tree.rolling):
            needed = group.needed_from(node.unit)
            for unit in range(node.unit, group.unit_of(needed) - 1, -1):
                needs_pages = True
                at = tree.nodes.get(chain[unit])
                offset = max(0, needed - group.first_page(unit))
                if at is None or at.parts[index].kept_from > offset:
                    return unit
        return None if needs_pages else node.unit

    def _last_boundary(self, row: CacheRow, before: Tokens, offered: list[int]) -> int | None:
        """The last boundary, beyond those tried before, that can be hit with these pages."""
        count = min(self._unit_count(row.chain, row.prompt), row.settled // self.unit)
        for unit in range(count - 1, max(row.unit_count, before // self.unit) - 1, -1):
            if self._is_complete(unit, offered):
                return unit
        return None

    def _is_complete(self, unit: int, here_from: list[int]) -> bool:
        """Can the boundary be hit if of each rolling group all from a page on is here?

        A layout without whole groups keeps nothing for a hit that needs nothing.
        """
        needs_pages = bool(self.tree.whole_groups)
        for group, first in zip(self.tree.rolling, here_from, strict=True):
            needed = group.needed_from(unit)
            if needed < group.first_page(unit + 1):
                needs_pages = True
                if needed < first:
                    return False
        return needs_pages

    def _grow(
        self,
        row: CacheRow,
        holding: HoldingId,
        tables: Sequence[PageTable],
        offered: list[int],
        last: int,
    ) -> list[Node]:
        """Let the row's path go on to unit `last`, and open what can be hit.

        Returns the nodes that are new to the path, or may have been; the last of them is open.
        """
        tree = self.tree
        first = row.unit_count
        if row.node is not None and not tree.is_linked(row.node):
            first = 0  # It was evicted with all below it, although the row still has its pages.
        elif row.node is not None and not row.node.is_open:
            first = min([first, *(g.unit_of(g.needed_from(last)) for g in tree.rolling)])
        node = tree.nodes.get(row.chain[first - 1]) if first else None
        # As in `find`, but what is offered is here as well.
        here_from = [
            group.needed_from(node.unit)
            if node is not None and node.is_open
            else group.first_page(first)
            for group in tree.rolling
        ]
        path: list[Node] = []
        for unit in range(first, last + 1):
            node = self._extend(row, holding, tables, unit, node, offered)
            if node is None:
                here_from = [group.first_page(unit + 1) for group in tree.rolling]
                path.clear()
                continue
            path.append(node)
            for index, part in enumerate(node.parts):
                start = part.group.first_page(unit)
                offset = min(part.kept_from, max(part.useful_from, offered[index] - start))
                if offset > part.useful_from:
                    here_from[index] = start + offset
            if not node.is_open and self._is_complete(unit, here_from):
                self._supply(node, holding, tables)
                tree.open(node)
        return path

    def _extend(
        self,
        row: CacheRow,
        holding: HoldingId,
        tables: Sequence[PageTable],
        unit: int,
        parent: Node | None,
        offered: list[int],
    ) -> Node | None:
        """The node of this unit, a new one if need be.

        None without whole groups, where the row has no page of a unit that is not there.
        """
        tree, key = self.tree, row.chain[unit]
        node = tree.nodes.get(key)
        if node is not None:
            if node.parent is None and parent is not None:
                tree.link(node, parent)
            return node
        ends = [group.first_page(unit + 1) for group in tree.rolling]
        if not tree.whole_groups and not any(f < e for f, e in zip(offered, ends, strict=True)):
            return None
        whole = [
            tables[index].pages(
                self._groups[index].first_page(unit), self._groups[index].page_count
            )
            for index in tree.whole_groups
        ]
        node = tree.add(key, unit, parent, whole)
        for index, pages in zip(tree.whole_groups, whole, strict=True):
            self._attach(index, pages, holding, node)
        return node

    def _supply(self, node: Node, holding: HoldingId, tables: Sequence[PageTable]) -> None:
        """Give the tree those of the row's pages that it lacks to open the node."""
        for part, offset in self.tree.lacking(node):
            index = self.tree.rolling_groups[part.index]
            first = part.group.first_page(part.node.unit) + offset
            pages = tables[index].pages(first, part.group.page_count - offset)
            self.tree.keep(part, pages)
            self._attach(index, pages, holding, part)

    def _attach(
        self, index: int, pages: Sequence[PageId], holding: HoldingId, keeper: Node | Part
    ) -> None:
        for page in pages:
            self._pools[index].attach(page, holding)
            self._keepers[index][page] = keeper

    def _left(self, group: int, page: PageId) -> None:
        self.generation += 1
        pool = self._pools[group]
        self.stats.evicted_pages += pool.is_idle(page)
        del self._keepers[group][page]
        pool.detach(page)

    def _changed(self, part: Part) -> None:
        self._parts_by_age[part.index].put(part)

    def _bared(self, node: Node) -> None:
        """An idle node comes up for eviction when no child of it is idle."""
        if not any(map(self._is_idle, node.children.values())):
            self._nodes_by_age.put(node)

    def _is_idle(self, node: Node) -> bool:
        return self._pools[self.tree.whole_groups[0]].is_idle(node.whole[0][0])

    def _age_of_node(self, node: Node) -> Age | None:
        """Leaves first: what is below others is on lease, though they are not."""
        if self.tree.is_linked(node) and self._is_idle(node):
            return len(node.children) > 0, node.stamp
        return None

    def _age_of_part(self, part: Part) -> Age | None:
        """Loose pages first, and of these the upper ones; of the others the lower ones."""
        pool = self._pools[self.tree.rolling_groups[part.index]]
        if not part.ids or not pool.is_idle(part.ids[0]):
            return None
        if part.is_firm:
            return 1, part.stamp, -part.node.unit
        return 0, part.stamp, part.node.unit
