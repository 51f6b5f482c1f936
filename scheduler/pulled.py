"""What a target has copied of its prompt's pages, by pulls that follow one another."""

from tidegate.kvcache.layout import Tokens


class Pulled:
    """Of the groups that move as a whole, the pages of positions below `until` are there.

    With the pull under way, if there is one, they are there up to `asked_until`.
    """

    def __init__(self) -> None:
        self.until = Tokens(0)
        self.asked_until = Tokens(0)
        self.byte_count = 0
        self.early_byte_count = 0  # Of them, by pulls that were sent while the prompt ran.
        self.busy_us = 0

    def note(self, byte_count: int, busy_us: int, *, is_early: bool) -> None:
        """The pull under way is over."""
        self.until = self.asked_until
        self.byte_count += byte_count
        self.busy_us += busy_us
        if is_early:
            self.early_byte_count += byte_count
