"""How fast a server is beside a bare loop over the same model, and a hand-off beside memcpy.

The server is `tidegate serve` in its own processes, with one prefill and one decode worker of
one thread each unless told. When it has been stopped, the bare loop runs alone with the same
number of threads. The ratios are what counts: absolute speeds depend on the machine and its
neighbours.

    python benchmarks/first_light.py            # Gemma 3 270M, some minutes
    python benchmarks/first_light.py --help
"""

import argparse
import ctypes
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import msgspec
import torch
import trio

from model_options import add_model_options
from served_model import (
    CONTEXT_TOKENS,
    START_S_MAX,
    bare_loop,
    card_when_ready,
    decode_speed,
    server,
)
from tidegate import AsyncClient

STREAM_COUNTS = (1, 8, 32)
COPY_BYTES = 64 * 1024 * 1024
COPY_COUNT = 20


class Handoff(msgspec.Struct):
    """A `handoff_done` line of the log."""

    event: str
    bytes_moved: int = 0
    busy_us: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add_model_options(parser)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--prompt-count", type=int, default=4)
    parser.add_argument("--step-count", type=int, default=48, help="decode steps measured")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAM_COUNTS))
    arguments = parser.parse_args()

    figures: dict[str, float] = {}
    with server(arguments) as (endpoint, log):
        trio.run(measure_server, endpoint, arguments, figures)
        figures["handoff_gb_per_s"] = handoff_gb_per_s(log)
    figures["memcpy_gb_per_s"] = memcpy_gb_per_s()
    figures["handoff_over_memcpy"] = figures["handoff_gb_per_s"] / figures["memcpy_gb_per_s"]
    measure_bare(arguments, figures)
    print_table(figures, arguments.streams)
    print(json.dumps({"benchmark": "first_light", "figures": figures}))


# --- The server ---


async def measure_server(
    endpoint: str, arguments: argparse.Namespace, figures: dict[str, float]
) -> None:
    async with AsyncClient(endpoint, connect_ms_max=round(START_S_MAX * 1000)) as client:
        card = await card_when_ready(client)
        source = random.Random(0)

        def prompt(count: int) -> list[int]:
            return [source.randrange(card.vocab_size) for _ in range(count)]

        await one(client, prompt(arguments.prompt_tokens), 1)  # Warm.
        begin = time.perf_counter()
        for _ in range(arguments.prompt_count):
            await one(client, prompt(arguments.prompt_tokens), 1)
        seconds = time.perf_counter() - begin
        total = arguments.prompt_tokens * arguments.prompt_count
        figures["prefill_tokens_per_s"] = total / seconds
        for count in arguments.streams:
            prompts = [prompt(CONTEXT_TOKENS) for _ in range(count)]
            speed = await decode_speed(client, prompts, arguments.step_count)
            figures[f"decode_tokens_per_s_{count}"] = speed.tokens_per_s


async def one(client: AsyncClient, prompt: Sequence[int], max_tokens: int) -> None:
    await client.complete(
        prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenise=False
    )


def handoff_gb_per_s(log: Path) -> float:
    """Bytes over time of all hand-offs in the log."""
    decode = msgspec.json.Decoder(Handoff).decode
    handoffs = [decode(line) for line in log.read_bytes().splitlines()]
    done = [handoff for handoff in handoffs if handoff.event == "handoff_done"]
    moved = sum(handoff.bytes_moved for handoff in done)
    return moved / sum(handoff.busy_us for handoff in done) / 1000


def memcpy_gb_per_s() -> float:
    """One large copy after the other, by the C library."""
    source, target = bytearray(COPY_BYTES), bytearray(COPY_BYTES)
    pointer = ctypes.c_char * COPY_BYTES
    begin = 0.0
    for index in range(COPY_COUNT + 1):
        if index == 1:
            begin = time.perf_counter()
        ctypes.memmove(pointer.from_buffer(target), pointer.from_buffer(source), COPY_BYTES)
    return COPY_BYTES * COPY_COUNT / (time.perf_counter() - begin) / 1e9


# --- The bare loop ---


def measure_bare(arguments: argparse.Namespace, figures: dict[str, float]) -> None:
    torch.set_num_threads(arguments.threads)
    loop = bare_loop(arguments)
    speed = loop.prefill_tokens_per_s(arguments.prompt_tokens, arguments.prompt_count, 512)
    figures["bare_prefill_tokens_per_s"] = speed
    figures["prefill_served_over_bare"] = figures["prefill_tokens_per_s"] / speed
    for count in arguments.streams:
        speed = loop.decode_tokens_per_s(count, CONTEXT_TOKENS, arguments.step_count)
        figures[f"bare_decode_tokens_per_s_{count}"] = speed
        served = figures[f"decode_tokens_per_s_{count}"]
        figures[f"served_over_bare_{count}"] = served / speed


def print_table(figures: dict[str, float], streams: Sequence[int]) -> None:
    rows = [("prefill tokens/s", "prefill_tokens_per_s", "bare_prefill_tokens_per_s")]
    rows += [
        (
            f"decode tokens/s, {count} streams",
            f"decode_tokens_per_s_{count}",
            f"bare_decode_tokens_per_s_{count}",
        )
        for count in streams
    ]
    rows.append(("hand-off GB/s (beside memcpy)", "handoff_gb_per_s", "memcpy_gb_per_s"))
    print(f"{'':32}{'served':>12}{'bare':>12}{'ratio':>8}")
    for name, served, bare in rows:
        ratio = figures[served] / figures[bare]
        print(f"{name:32}{figures[served]:12.1f}{figures[bare]:12.1f}{ratio:8.3f}")


if __name__ == "__main__":
    main()
