"""How far back layers read, in words."""

import pytest

from tidegate.cli.reach_text import query_reads_text, reach_tag, reads_text
from tidegate.kvcache.layout import All, Reach, Tail, Tokens, Window


@pytest.mark.parametrize(
    ("reach", "tag", "short", "long"),
    [
        (All(), "all", "all positions", "all positions"),
        (Window(Tokens(1024)), "window", "window of 1,024", "itself and 1,023 before"),
        (Tail(Tokens(128), 0), "tail", "tail of 128", "its stretch of 128"),
        (Tail(Tokens(4), 1), "tail", "tail of 2 x 4", "its stretch of 4 and 1 before"),
    ],
)
def test_each_reach_has_words(reach: Reach, tag: str, short: str, long: str) -> None:
    assert (reach_tag(reach), reads_text(reach), query_reads_text(reach)) == (tag, short, long)
