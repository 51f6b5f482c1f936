"""The lightning indexer: which compressed entries a query of a CSA layer reads.

An entry's score is the sum over the indexer's heads of weight * relu(query . key). Scores are
computed for some entries at a time, so that memory is bounded however long the prompt is.
"""

import torch

from tidegate.engine.checkpoint.families.deepseek_v4 import IndexerSizes
from tidegate.engine.models.linear import Linear
from tidegate.engine.models.rotary import rotate

# Products of queries and keys that are held at once, over all heads of the indexer.
PRODUCT_COUNT_MAX = {"cpu": 2**20, "cuda": 2**27}


class Chooser:
    """One launch's side of one layer's indexer.

    `key_pages` [page_count, entries of a page, head size] hold the indexer's keys. `queries`
    [tokens, heads, head size] are rotated, `weights` [tokens, heads] scaled, in float32.
    """

    def __init__(
        self,
        key_pages: torch.Tensor,
        queries: torch.Tensor,
        weights: torch.Tensor,
        entry_count_max: int,
    ) -> None:
        self.key_pages = key_pages
        self.entry_count_max = entry_count_max
        self._queries, self._weights = queries, weights

    def choose(
        self, tokens: slice | torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """The entries with the highest scores for each query of `tokens`: [queries, count].

        `keys` [entries, head size] are for all queries, or [queries, entries, head size] for
        one each. Where `hidden` [queries, entries] is set the entry comes last.
        """
        scores = self._scores(self._queries[tokens], self._weights[tokens], keys)
        scores.masked_fill_(hidden, -torch.inf)
        return scores.topk(min(self.entry_count_max, scores.shape[1]), 1).indices

    def _scores(
        self, queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        query_count, head_count, _ = queries.shape
        entry_count = keys.shape[-2]
        scores = weights.new_empty(query_count, entry_count)
        product_max = PRODUCT_COUNT_MAX[queries.device.type]
        step = max(1, product_max // (query_count * head_count))
        for first in range(0, entry_count, step):
            part = keys[..., first : first + step, :].transpose(-1, -2)
            if keys.ndim == 2:
                products = torch.mm(queries.flatten(0, 1), part)
                products = products.view(query_count, head_count, -1)
            else:
                products = torch.bmm(queries, part)
            positive = products.float().relu_()
            sums = torch.bmm(weights.unsqueeze(1), positive).squeeze(1)
            scores[:, first : first + step] = sums
        return scores


class Indexer:
    """Makes a launch's `Chooser`, from the same low-rank queries as the layer's attention."""

    def __init__(self, query: Linear, sizes: IndexerSizes, dtype: torch.dtype) -> None:
        self._query, self._sizes, self._dtype = query, sizes, dtype
        self._scale = (sizes.head_count * sizes.head_size) ** -0.5

    def __call__(
        self,
        low_rank: torch.Tensor,
        weights: torch.Tensor,
        rotation: torch.Tensor,
        key_pages: torch.Tensor,
    ) -> Chooser:
        """`weights` [tokens, heads], float32, are as projected: they are scaled here."""
        sizes = self._sizes
        queries = self._query(low_rank).float().view(-1, sizes.head_count, sizes.head_size)
        rotate(queries[..., sizes.head_size - 2 * rotation.shape[-1] :], rotation)
        return Chooser(
            key_pages, queries.to(self._dtype), weights * self._scale, sizes.entry_count_max
        )
