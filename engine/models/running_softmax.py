"""Attention over keys that come in parts, with one softmax over all of them."""

import torch


class RunningSoftmax:
    """Sums values by the softmax of their scores, some keys at a time.

    `sinks` [heads], float32, are one more score of every query, whose weight adds nothing. For
    each query and head it holds the highest score so far, the sum of the weights relative to
    it, and the weighted sum of the values (as in arXiv 1805.02867).
    """

    def __init__(self, sinks: torch.Tensor, token_count: int, value_size: int) -> None:
        self._peaks = sinks.repeat(token_count, 1)
        self._totals = torch.ones_like(self._peaks)
        self._sums = sinks.new_zeros(token_count, sinks.shape[0], value_size)

    def add(
        self, tokens: slice | torch.Tensor, scores: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Keys with `scores` [queries, heads, keys], float32, at least one, for the queries of
        `tokens`. Where they are -inf, the value has no effect unless it is NaN.

        `values` are [keys, size] for all queries, or [queries, keys, size].
        """
        before = self._peaks[tokens]
        peaks = torch.maximum(before, scores.amax(2))
        weights = (scores - peaks.unsqueeze(2)).exp_()
        kept = (before - peaks).exp_()
        typed = weights.to(values.dtype)
        if values.ndim == 2:
            sums = torch.mm(typed.flatten(0, 1), values).view(*typed.shape[:2], -1)
        else:
            sums = torch.bmm(typed, values)
        self._totals[tokens] = self._totals[tokens] * kept + weights.sum(2)
        self._sums[tokens] = self._sums[tokens] * kept.unsqueeze(2) + sums.float()
        self._peaks[tokens] = peaks

    def result(self) -> torch.Tensor:
        """[tokens, heads, value size], float32."""
        return self._sums / self._totals.unsqueeze(2)
