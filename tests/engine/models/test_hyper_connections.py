"""Streams are read, mixed and written as the paper says."""

import torch

from tidegate.engine.checkpoint.families.deepseek_v4 import Streams
from tidegate.engine.models.hyper_connections import StreamMixer, write

SIZES = Streams(count=3, round_count=20, eps=1e-6)


def numbers(*shape: int, seed: int = 9) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixer(seed: int) -> StreamMixer:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(15, 12, generator=generator) / 12**0.5
    base = torch.randn(15, generator=generator)
    return StreamMixer(weight, base, torch.tensor([0.5, 1.0, 2.0]), SIZES, 1e-6)


def test_the_matrix_that_mixes_is_doubly_stochastic() -> None:
    streams = numbers(7, 3, 4)
    _, shares, mixing = mixer(1).read(streams)
    # Columns are scaled last; rows are near 1 after so many rounds.
    assert (mixing.sum(1) - 1).abs().max() < 1e-4
    assert (mixing.sum(2) - 1).abs().max() < 5e-2
    assert (mixing > 0).all()
    assert ((shares > 0) & (shares < 2)).all()


def test_what_all_streams_have_in_common_is_kept() -> None:
    streams = numbers(7, 1, 4).expand(-1, 3, -1).contiguous()
    _, shares, mixing = mixer(2).read(streams)
    after = write(streams, torch.zeros(7, 4), shares, mixing)
    assert (after - streams).abs().max() < 1e-3


def test_each_stream_gets_its_share_and_the_mixture_of_a_column() -> None:
    streams, mixing = numbers(2, 3, 4, seed=1), numbers(2, 3, 3, seed=2)
    output, shares = numbers(2, 4, seed=3), numbers(2, 3, seed=4)
    after = write(streams, output, shares, mixing)
    for token in range(2):
        for stream in range(3):
            wanted = shares[token, stream] * output[token]
            wanted = wanted + (mixing[token, :, stream, None] * streams[token]).sum(0)
            assert (after[token, stream] - wanted).abs().max() < 1e-5
