"""Numbers as people read them: times, sizes, counts and columns."""

from collections.abc import Sequence


def time_text(microseconds: int) -> str:
    """740 us, 12.3 ms, 4.56 s."""
    if abs(microseconds) < 1000:
        return f"{microseconds} us"
    if abs(microseconds) < 1_000_000:
        return f"{microseconds / 1000:.1f} ms"
    return f"{microseconds / 1_000_000:.2f} s"


def bytes_text(size: int) -> str:
    """960 B, 1.5 KiB, 2.0 GiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count_text(count: int, noun: str) -> str:
    """1 page, 2,000 pages."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines of equally wide columns; those whose index is in `right` end in line."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
