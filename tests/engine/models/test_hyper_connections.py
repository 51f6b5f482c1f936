"""Streams are read, mixed and written as the paper says."""

import torch

from tidegate.engine.checkpoint.families.deepseek_v4 import Streams
from tidegate.engine.models.hyper_connections import StreamMixer, write

SIZES = Streams(count=3, round_count=20, eps=1e-6)


def mixer(seed: int) -> StreamMixer:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(15, 12, generator=generator) / 12**0.5
    base = torch.randn(15, generator=generator)
    return StreamMixer(weight, base, torch.tensor([0.5, 1.0, 2.0]), SIZES, 1e-6)


def test_the_matrix_that_mixes_is_doubly_stochastic() -> None:
    streams = torch.randn(7, 3, 4)
    _, shares, mixing = mixer(1).read(streams)
    assert (mixing.sum(1) - 1).abs().max() < 1e-3
    assert (mixing.sum(2) - 1).abs().max() < 1e-3
    assert (mixing > 0).all()
    assert ((shares > 0) & (shares < 2)).all()


def test_what_all_streams_have_in_common_is_kept() -> None:
    streams = torch.randn(7, 1, 4).expand(-1, 3, -1).contiguous()
    _, shares, mixing = mixer(2).read(streams)
    after = write(streams, torch.zeros(7, 4), shares, mixing)
    assert (after - streams).abs().max() < 1e-2


def test_each_stream_gets_its_share_and_the_mixture_of_a_column() -> None:
    streams = torch.randn(2, 3, 4)
    output, shares = torch.randn(2, 4), torch.randn(2, 3)
    mixing = torch.randn(2, 3, 3)
    after = write(streams, output, shares, mixing)
    for token in range(2):
        for stream in range(3):
            wanted = shares[token, stream] * output[token]
            wanted = wanted + (mixing[token, :, stream, None] * streams[token]).sum(0)
            assert (after[token, stream] - wanted).abs().max() < 1e-5
