"""Attention in parts is attention at once."""

import pytest
import torch

from tidegate.engine.models.running_softmax import RunningSoftmax


def at_once(scores: torch.Tensor, sinks: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`scores` [queries, heads, keys], `values` [queries, keys, size]."""
    column = sinks.view(1, -1, 1).expand(*scores.shape[:2], 1)
    weights = torch.softmax(torch.cat([scores, column], 2), 2)[..., :-1]
    return torch.bmm(weights, values)


@pytest.mark.parametrize("seed", range(3))
def test_parts_for_some_queries_at_a_time_add_up(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = 30 * torch.randn(5, 3, 8, generator=generator)
    scores[2, :, :4] = -torch.inf
    sinks = torch.randn(3, generator=generator)
    shared = torch.randn(4, 6, generator=generator)
    own = torch.randn(5, 4, 6, generator=generator)
    softmax = RunningSoftmax(sinks, 5, 6)
    order = torch.tensor([4, 0, 3])
    softmax.add(order, scores[order, :, 4:], own[order])
    softmax.add(slice(0, 5), scores[:, :, :4], shared)
    softmax.add(slice(1, 3), scores[1:3, :, 4:], own[1:3])
    values = torch.cat([shared.expand(5, 4, 6), own], 1)
    assert (softmax.result() - at_once(scores, sinks, values)).abs().max() < 1e-5


def test_a_query_without_any_key_reads_nothing() -> None:
    softmax = RunningSoftmax(torch.zeros(2), 3, 4)
    softmax.add(slice(0, 1), torch.full((1, 2, 5), -torch.inf), torch.ones(5, 4))
    assert torch.equal(softmax.result(), torch.zeros(3, 2, 4))
    softmax.add(slice(0, 1), torch.zeros(1, 2, 1), torch.ones(1, 4))
    assert torch.equal(softmax.result()[0], torch.full((2, 4), 0.5))
