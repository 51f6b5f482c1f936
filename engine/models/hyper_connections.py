"""Hyper-connections: a residual of several streams, which each block reads and mixes.

Source: manifold-constrained hyper-connections (arXiv 2512.24880). All of it is float32.
"""

import torch
import torch.nn.functional as functional

from tidegate.engine.checkpoint.families.deepseek_v4 import Streams
from tidegate.engine.models.parts import normalise


class StreamMixer:
    """A block's way in and out of the streams: `weight` [(count + 2) * count, count * hidden],
    `base` [(count + 2) * count] and `scale` [3], float32.

    Weight and base hold what gives the shares for reading, then those for writing, then the
    matrix that mixes; `scale` has a factor for each of the three.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        sizes: Streams,
        norm_eps: float,
    ) -> None:
        self._weight, self._sizes, self._norm_eps = weight, sizes, norm_eps
        self._split = [sizes.count, sizes.count, sizes.count**2]
        self._bases = torch.split(base, self._split)
        self._scales = [float(each) for each in scale]

    def read(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From `streams` [tokens, count, hidden]: the block's input [tokens, hidden]; and for
        `write` the shares [tokens, count] and the matrix [tokens, count, count].
        """
        count, eps = self._sizes.count, self._sizes.eps
        flat = normalise(streams.flatten(1), self._norm_eps)
        parts = torch.split(functional.linear(flat, self._weight), self._split, 1)
        reading, writing, mixing = (
            part * scale + base
            for part, scale, base in zip(parts, self._scales, self._bases, strict=True)
        )
        reading = torch.sigmoid(reading) + eps
        writing = 2 * torch.sigmoid(writing)
        mixing = torch.softmax(mixing.view(-1, count, count), 2) + eps
        mixing = mixing / (mixing.sum(1, keepdim=True) + eps)
        for _ in range(self._sizes.round_count - 1):
            mixing = mixing / (mixing.sum(2, keepdim=True) + eps)
            mixing = mixing / (mixing.sum(1, keepdim=True) + eps)
        collapsed = torch.bmm(reading.unsqueeze(1), streams).squeeze(1)
        return collapsed, writing, mixing


def write(
    streams: torch.Tensor, output: torch.Tensor, shares: torch.Tensor, mixing: torch.Tensor
) -> torch.Tensor:
    """The streams after a block: mixed with each other, and with their shares of its `output`
    [tokens, hidden] added.
    """
    added = shares.unsqueeze(2) * output.unsqueeze(1)
    return torch.baddbmm(added, mixing.transpose(1, 2), streams)


class StreamHead:
    """The way out of the last layer: `weight` [count, count * hidden], `base` [count] and
    `scale` [1], float32.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        eps: float,
        norm_eps: float,
    ) -> None:
        self._weight, self._base, self._scale = weight, base, float(scale)
        self._eps, self._norm_eps = eps, norm_eps

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] from [tokens, count, hidden]."""
        flat = normalise(streams.flatten(1), self._norm_eps)
        scores = functional.linear(flat, self._weight) * self._scale + self._base
        reading = torch.sigmoid(scores) + self._eps
        return torch.bmm(reading.unsqueeze(1), streams).squeeze(1)
