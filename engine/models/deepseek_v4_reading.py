"""How DeepSeek V4's queries read pages: the window's keys, and compressed entries.

Keys are values too, and all heads share them. What a query may not see has no effect: it may
be NaN, since pages are not cleared.
"""

from collections.abc import Iterator

import torch

from tidegate.engine.attention import KEYS, SCORE_ROWS, VALUES, Scratch
from tidegate.engine.attention_plan import DecodeBucket, GroupPlan, PrefillPiece
from tidegate.engine.models.deepseek_v4_indexer import Chooser
from tidegate.engine.models.running_softmax import RunningSoftmax

INDEX_KEYS = VALUES  # Keys are the values here, so that buffer is free.


class Reader:
    """The queries of one layer in one launch: `queries` [tokens, heads, size], rotated and
    scaled, at `positions` [tokens]. What they read goes to `softmax`.
    """

    def __init__(
        self,
        softmax: RunningSoftmax,
        queries: torch.Tensor,
        positions: torch.Tensor,
        scratch: Scratch,
    ) -> None:
        self._softmax, self._scratch = softmax, scratch
        self._queries, self._positions = queries, positions
        self._block = max(1, SCORE_ROWS[queries.device.type] // queries.shape[1])

    def read_window(self, plan: GroupPlan, window: int, pages: torch.Tensor) -> None:
        """`pages` [page_count, page_tokens, size] of the group that `plan` is of."""
        for bucket in plan.decode:
            keys = self._scratch.gather(KEYS, pages, bucket.pages).flatten(0, 1)
            keys.index_fill_(0, bucket.unused, 0)
            keys = keys.view(bucket.rows.shape[0], -1, keys.shape[1])
            self._add_own(bucket.rows, keys, bucket.mask.isinf().squeeze(1))
        for piece in plan.prefill:
            first, end = piece.skip, piece.skip + piece.end - piece.first_key
            keys = self._scratch.gather(KEYS, pages, piece.pages).flatten(0, 1)[first:end]
            places = torch.arange(piece.first_key, piece.end, device=pages.device)
            for tokens, start, stop in self._blocks(piece):
                low = max(piece.first_key, start - window + 1)
                part = slice(low - piece.first_key, stop - piece.first_key)
                positions = self._positions[tokens].unsqueeze(1)
                hidden = (places[part] > positions) | (places[part] <= positions - window)
                self._add_shared(tokens, keys[part], hidden)

    def read_entries(
        self, plan: GroupPlan, ratio: int, pages: torch.Tensor, chooser: Chooser | None
    ) -> None:
        """`pages` [page_count, entries of a page, size] hold an entry for `ratio` tokens. A
        query sees those that are complete with its own token; with a `chooser` those of them
        that it chooses.
        """
        for bucket in plan.decode:
            self._read_entries_of_rows(bucket, ratio, pages, chooser)
        for piece in plan.prefill:
            self._read_entries_of_piece(piece, ratio, pages, chooser)

    def _read_entries_of_rows(
        self, bucket: DecodeBucket, ratio: int, pages: torch.Tensor, chooser: Chooser | None
    ) -> None:
        row_count, per_page = bucket.rows.shape[0], pages.shape[1]
        visible = self._visible(bucket.rows, ratio)
        page_ids = bucket.pages.view(row_count, -1)
        count = page_ids.shape[1] * per_page
        hidden = torch.arange(count, device=pages.device) >= visible
        if chooser is None or count <= chooser.entry_count_max:
            entries = self._scratch.gather(KEYS, pages, bucket.pages).view(row_count, count, -1)
        else:
            keys = self._scratch.gather(INDEX_KEYS, chooser.key_pages, bucket.pages)
            keys = keys.view(row_count, count, -1).masked_fill_(hidden.unsqueeze(2), 0)
            chosen = chooser.choose(bucket.rows, keys, hidden)
            entries = pages[page_ids.gather(1, chosen // per_page), chosen % per_page]
            hidden = chosen >= visible
        entries.masked_fill_(hidden.unsqueeze(2), 0)
        self._add_own(bucket.rows, entries, hidden)

    def _read_entries_of_piece(
        self, piece: PrefillPiece, ratio: int, pages: torch.Tensor, chooser: Chooser | None
    ) -> None:
        per_page, end = pages.shape[1], piece.end // ratio
        # Up to how many entries a block of queries reads all that it sees.
        count_max = end if chooser is None else chooser.entry_count_max
        entries = keys = pages[:0, 0]
        if (piece.start + 1) // ratio <= count_max:
            entries = self._scratch.gather(KEYS, pages, piece.pages).flatten(0, 1)[:end]
        if chooser is not None and end > count_max:
            keys = self._scratch.gather(INDEX_KEYS, chooser.key_pages, piece.pages)
            keys = keys.flatten(0, 1)[:end]
        for tokens, _, stop in self._blocks(piece):
            count = stop // ratio
            if count == 0:
                continue
            visible = self._visible(tokens, ratio)
            hidden = torch.arange(count, device=pages.device) >= visible
            if chooser is None or count <= count_max:
                self._add_shared(tokens, entries[:count], hidden)
                continue
            chosen = chooser.choose(tokens, keys[:count], hidden)
            hidden = chosen >= visible
            own = pages[piece.pages[chosen // per_page], chosen % per_page]
            self._add_own(tokens, own.masked_fill_(hidden.unsqueeze(2), 0), hidden)

    def _visible(self, tokens: slice | torch.Tensor, ratio: int) -> torch.Tensor:
        """How many entries each query sees: [queries, 1]."""
        return ((self._positions[tokens] + 1) // ratio).unsqueeze(1)

    def _blocks(self, piece: PrefillPiece) -> Iterator[tuple[slice, int, int]]:
        """Some of the piece's tokens at a time, with their first position and its end."""
        for first in range(0, piece.count, self._block):
            count = min(self._block, piece.count - first)
            token, start = piece.first_token + first, piece.start + first
            yield slice(token, token + count), start, start + count

    def _add_shared(self, tokens: slice, keys: torch.Tensor, hidden: torch.Tensor) -> None:
        """Keys [keys, size] that are the same for all queries of `tokens`."""
        queries = self._queries[tokens]
        products = torch.mm(queries.flatten(0, 1), keys.t()).float()
        scores = products.view(queries.shape[0], queries.shape[1], -1)
        scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
        self._softmax.add(tokens, scores, keys)

    def _add_own(
        self, tokens: slice | torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Keys [queries, keys, size], some for each query."""
        scores = torch.bmm(self._queries[tokens], keys.transpose(1, 2)).float()
        scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
        self._softmax.add(tokens, scores, keys)
