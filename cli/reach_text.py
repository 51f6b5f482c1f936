"""How far back a group's layers read, in words."""

from tidegate.kvcache.layout import All, Reach, Tail, Window


def reads_text(reach: Reach) -> str:
    """all positions, window of 512, tail of 128, tail of 2 x 4."""
    match reach:
        case All():
            return "all positions"
        case Window(tokens=tokens):
            return f"window of {tokens:,}"
        case Tail(ratio=ratio, overlap=0):
            return f"tail of {ratio:,}"
        case Tail(ratio=ratio, overlap=overlap):
            return f"tail of {overlap + 1} x {ratio:,}"


def query_reads_text(reach: Reach) -> str:
    """What a query reads: all positions, itself and 511 before, its stretch of 4 and 1 before.

    A stretch is what a tail makes one compressed entry of.
    """
    match reach:
        case All():
            return "all positions"
        case Window(tokens=tokens):
            return f"itself and {tokens - 1:,} before"
        case Tail(ratio=ratio, overlap=overlap):
            return f"its stretch of {ratio:,}" + (f" and {overlap} before" if overlap else "")


def reach_tag(reach: Reach) -> str:
    """all, window or tail."""
    match reach:
        case All():
            return "all"
        case Window():
            return "window"
        case Tail():
            return "tail"
