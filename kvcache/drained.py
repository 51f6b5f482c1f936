"""Pages that were withdrawn, until launches in flight can no longer touch them."""

from tidegate.kvcache.layout import PageId


class Drained:
    """What was withdrawn with one plan: for each group pages owned, and pages leased."""

    def __init__(self, plan: int) -> None:
        self.plan = plan
        self.owned: list[list[PageId]] = []
        self.leased: list[list[PageId]] = []
