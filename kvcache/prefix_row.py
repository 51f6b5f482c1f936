"""What a lookup finds, and what the cache knows of a row from then on."""

from collections.abc import Sequence

from tidegate.kvcache.layout import Tail, Tokens
from tidegate.kvcache.page_table import PageTable
from tidegate.kvcache.prefix_node import Mark, Node, UnitHash
from tidegate.kvcache.units import GroupUnits


class Hit:
    """`tokens` of a prompt are cached: its first `unit_count` units.

    It holds until a page leaves the cache: as long as `generation` is the cache's.
    """

    def __init__(
        self,
        tokens: Tokens,
        unit_count: int,
        chain: Sequence[UnitHash],
        prompt: Tokens,
        generation: int,
    ) -> None:
        self.tokens = tokens
        self.unit_count = unit_count
        self.chain = chain
        self.prompt = prompt
        self.generation = generation


class CacheRow:
    """The end of a row's path in the tree, and what else the row may add to it.

    `node` is the last of its nodes, `unit_count` how many units end with it. `mark` is the mark
    that moves along with it while the prompt runs, once it has published.
    """

    def __init__(self, hit: Hit, node: Node | None, rolling: Sequence[GroupUnits]) -> None:
        self.chain = hit.chain
        self.prompt = hit.prompt
        self.unit_count = hit.unit_count
        self.node = node
        self.mark: Mark | None = None
        self.settled = hit.tokens
        # For each rolling group: rows from here on have been written. Those of leased pages
        # have been, as far as any hit may read them.
        self._written_from = [Tokens(0)] * len(rolling)

    def settle(
        self, rolling: Sequence[GroupUnits], tables: Sequence[PageTable], settled: Tokens
    ) -> list[int]:
        """A launch up to `settled` is over; what is the first page of each rolling group that
        the row could add? `tables` are those of the rolling groups.

        Of a tail group the launch may have written no more than what `settled` needs. A page
        of it counts only if all its rows that a hit may read have been written.
        """
        offered: list[int] = []
        for index, (units, table) in enumerate(zip(rolling, tables, strict=True)):
            group, first = units.group, int(table.first_page)
            if isinstance(group.reach, Tail):
                needed = group.first_needed(settled)
                if self.settled < needed:
                    self._written_from[index] = needed
                written = self._written_from[index]
                page = group.page_of(written)
                read_from = group.first_needed(units.end(units.unit_of(page)))
                is_written = written <= max(group.start_of(page), read_from)
                first = max(first, page if is_written else page + 1)
            offered.append(first)
        self.settled = settled
        return offered
