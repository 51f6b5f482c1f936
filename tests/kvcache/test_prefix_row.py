"""What of a row's pages others may find: only what its launches have written."""

from fakes.cached_worker import CachedWorker, layout_of
from tidegate.kvcache.layout import All, Tail, Tokens

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5)


def test_a_page_of_a_tail_that_a_launch_wrote_in_part_is_not_found() -> None:
    """The launch that ends at 12 begins its tail at row 9, in a page with row 8, which the
    hit of 10 reads. Nor are those beyond found, which would need that page."""
    layout = layout_of((All(), 1), (Tail(Tokens(3), 1), 2))
    cached = CachedWorker(layout, [60, 60])
    cached.serve(PROMPT, chunk=4)
    cached.check()
    hits = [cached.find((*PROMPT[:length], 9)) for length in (4, 6, 8, 10, 12)]
    assert [None if hit is None else hit.tokens for hit in hits] == [4, 6, 8, 8, 8]
