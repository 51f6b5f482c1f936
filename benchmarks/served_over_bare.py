"""Decode speed of a server over that of a bare loop, which take turns."""

import argparse
from random import Random
from statistics import median

import torch
import trio

from served_model import (
    CONTEXT_TOKENS,
    START_S_MAX,
    bare_loop,
    card_when_ready,
    decode_speed,
    server,
)
from tidegate import AsyncClient
from tidegate.engine.bare_loop import BareLoop


def measure_served(
    arguments: argparse.Namespace, source: Random, figures: dict[str, float | None]
) -> None:
    """`served_over_bare_N` for each number of streams; the server idles in the loop's turns."""
    torch.set_num_threads(arguments.threads)
    loop = bare_loop(arguments)
    with server(arguments) as (endpoint, _):
        print(f"\n{'streams':>24}{'served':>10}{'bare':>10}{'ratio':>8}")
        trio.run(_take_turns, endpoint, arguments, loop, source, figures)


async def _take_turns(
    endpoint: str,
    arguments: argparse.Namespace,
    loop: BareLoop,
    source: Random,
    figures: dict[str, float | None],
) -> None:
    steps: int = arguments.step_count
    async with AsyncClient(endpoint, connect_ms_max=round(START_S_MAX * 1000)) as client:
        card = await card_when_ready(client)
        for count in arguments.streams:
            prompts = [
                [source.randrange(card.vocab_size) for _ in range(CONTEXT_TOKENS)]
                for _ in range(count)
            ]
            # Not counted: the first turn finds cold memory, and tells how long contexts get.
            warm = await decode_speed(client, prompts, steps)
            bare = loop.begin_decoding(count, warm.context_tokens - steps // 2, steps)
            bare.tokens_per_s(count, steps)
            ratios: list[float] = []
            for number in range(arguments.rounds):
                served = await decode_speed(client, prompts, steps)
                bare.rewind()
                speed = bare.tokens_per_s(count, steps)
                ratios.append(served.tokens_per_s / speed)
                print(
                    f"{count:18d}, {number + 1:4d}{served.tokens_per_s:10.1f}{speed:10.1f}"
                    f"{ratios[-1]:8.3f}",
                    flush=True,
                )
            bare.close()
            figures[f"served_over_bare_{count}"] = median(ratios)
            print(f"{count:24d}{'median':>20}{median(ratios):8.3f}")
