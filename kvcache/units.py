"""Units: the stretches of a prompt that a prefix cache keeps or drops as a whole.

A *unit* is the lcm of the groups' page sizes in tokens, so it ends at a page's end in every
group. Unit k covers positions [k * unit, (k + 1) * unit), and its end is *boundary* k: a hit
ends at a boundary. Page indices are absolute, as in page tables; an *offset* counts the
pages of one group from the beginning of one unit.
"""

from math import lcm

from tidegate.kvcache.layout import Group, Layout, Pages, Tokens


def unit_tokens(layout: Layout) -> Tokens:
    return Tokens(lcm(*(group.page_tokens for group in layout.groups)))


class GroupUnits:
    """Where units begin and end in one group's pages, and what a hit needs of them."""

    def __init__(self, group: Group, unit: Tokens) -> None:
        self.group = group
        self.unit = unit
        self.page_count = group.pages(unit)
        self._needed_from: list[int] = []

    def end(self, unit: int) -> Tokens:
        """Boundary `unit`: how many tokens a hit of it covers."""
        return Tokens((unit + 1) * self.unit)

    def first_page(self, unit: int) -> int:
        """The index of the first page of this unit."""
        return unit * self.page_count

    def unit_of(self, page: int) -> int:
        """The unit to which the page with this index belongs."""
        return page // self.page_count

    def needed_from(self, unit: int) -> int:
        """The first page that a hit which ends at boundary `unit` needs. Monotone.

        It is the first page after the boundary if such a hit needs nothing of the group.
        """
        known = self._needed_from
        while unit >= len(known):
            needed = self.group.first_needed(self.end(len(known)))
            known.append(self.group.page_of(needed))
        return known[unit]

    def useful_from(self, unit: int) -> Pages:
        """The offset of the first page of the unit that any hit ever needs.

        A page that the unit's own boundary does not need is needed by no later one.
        """
        page = self.needed_from(unit)
        return Pages(min(max(0, page - self.first_page(unit)), self.page_count))
