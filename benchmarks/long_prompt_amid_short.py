"""What a long prompt does to the streams around it, and they to it.

    python benchmarks/long_prompt_amid_short.py                    # about ten minutes
    python benchmarks/long_prompt_amid_short.py --prompt-tokens 4000 --streams 16

Short streams decode; then a long prompt arrives. Measured, with the real server and model:

- the worst time between two tokens of a short stream from then to the prompt's first token,
  beside the usual one, which is the median of the time before;
- the prompt's own time to its first token, beside that on the same server when it is idle.

This is done for one worker of both roles, and for prefill and decode apart, each with chunks
and without; on the worker of both roles with chunks that are smaller while streams decode, and
with chunks that are not. Prefill and decode apart have two workers, with as many threads each.

A whole prompt is one launch only if the window pool holds all of it: with the usual pool it is
cut where pages end. So the servers without chunks have a window pool for it, and more memory.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median, quantiles

import msgspec
import trio

from model_options import add_model_options
from served_model import START_S_MAX, card_when_ready, server
from tidegate import AsyncClient

SHORT_PROMPT_TOKENS = 32
STEADY_S = 5.0  # How long short streams are watched before the long prompt arrives.
TOKENS_BEFORE_STEADY = 2  # Of each short stream.
LONG_OUTPUT_TOKENS = 2
ENDLESS_TOKENS = 16_384
RUN_S_MAX = 1200.0
WINDOW_TOKENS_OF_A_STREAM = 640  # Of the default model, and some that it runs ahead.
WHOLE_MEMORY = "2GiB"


class Case(msgspec.Struct, frozen=True):
    """A server to measure: `name` is of its figures, `options` are those of `serve`."""

    name: str
    title: str
    options: tuple[str, ...]
    is_whole: bool = False


CASES = (
    Case("both_chunks", "one worker, chunks", ("--role-both",)),
    Case(
        "both_chunks_alike",
        "one worker, chunks all alike",
        ("--role-both", "--mixed-chunk-tokens", "none"),
    ),
    Case(
        "both_whole",
        "one worker, whole prompts",
        ("--role-both", "--chunk-tokens", "none", "--mixed-chunk-tokens", "none"),
        is_whole=True,
    ),
    Case("pd_chunks", "apart, chunks", ()),
    Case("pd_whole", "apart, whole prompts", ("--chunk-tokens", "none"), is_whole=True),
)


class Amid(msgspec.Struct, frozen=True):
    """Seconds. `idle_ttft_s` is the same prompt's when nothing else runs."""

    usual_gap_s: float
    p99_gap_s: float
    worst_gap_s: float
    ttft_s: float
    idle_ttft_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add_model_options(parser)
    parser.add_argument("--prompt-tokens", type=int, default=20_000, help="of the long prompt")
    parser.add_argument("--streams", type=int, default=64, help="short ones")
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=[case.name for case in CASES],
        default=[case.name for case in CASES],
        help="which servers",
    )
    arguments = parser.parse_args()
    print(
        f"a prompt of {arguments.prompt_tokens} tokens amid {arguments.streams} streams\n"
        f"{'':>28}{'gap ms: usual':>14}{'p99':>9}{'worst':>9}"
        f"{'ttft s':>9}{'idle':>8}{'ratio':>8}"
    )
    figures: dict[str, float] = {}
    for case in CASES:
        if case.name in arguments.cases:
            take(case, measure(arguments, case), figures)
    print(json.dumps({"benchmark": "long_prompt_amid_short", "figures": figures}))


def take(case: Case, found: Amid, figures: dict[str, float]) -> None:
    """Print the case's line, and add its figures."""
    ratio = found.ttft_s / found.idle_ttft_s
    figures |= {
        f"usual_gap_ms_{case.name}": round(found.usual_gap_s * 1e3, 1),
        f"p99_gap_ms_{case.name}": round(found.p99_gap_s * 1e3, 1),
        f"worst_gap_ms_{case.name}": round(found.worst_gap_s * 1e3, 1),
        f"worst_over_usual_gap_{case.name}": round(found.worst_gap_s / found.usual_gap_s, 2),
        f"ttft_s_{case.name}": round(found.ttft_s, 2),
        f"ttft_over_idle_{case.name}": round(ratio, 2),
    }
    print(
        f"{case.title:>28}{found.usual_gap_s * 1e3:14.0f}{found.p99_gap_s * 1e3:9.0f}"
        f"{found.worst_gap_s * 1e3:9.0f}{found.ttft_s:9.1f}{found.idle_ttft_s:8.1f}"
        f"{ratio:8.2f}",
        flush=True,
    )


def measure(arguments: argparse.Namespace, case: Case) -> Amid:
    running = arguments.streams + 2
    # A prompt that was seen before would not be computed again.
    options = ["--max-running", str(running), "--no-prefix-cache", *case.options]
    if case.is_whole:
        window_tokens = arguments.prompt_tokens + running * WINDOW_TOKENS_OF_A_STREAM
        options += ["--window-pool-tokens", str(window_tokens), "--kv-memory", WHOLE_MEMORY]
    with server(arguments, options) as (endpoint, _):
        return trio.run(_measure_at, endpoint, arguments)


async def _measure_at(endpoint: str, arguments: argparse.Namespace) -> Amid:
    source = random.Random(0)
    async with AsyncClient(endpoint, connect_ms_max=round(START_S_MAX * 1000)) as client:
        card = await card_when_ready(client)

        def prompt_of(count: int) -> list[int]:
            return [source.randrange(card.vocab_size) for _ in range(count)]

        long_prompt = prompt_of(arguments.prompt_tokens)
        short_prompts = [prompt_of(SHORT_PROMPT_TOKENS) for _ in range(arguments.streams)]
        with trio.fail_after(RUN_S_MAX):
            await _ttft_s(client, short_prompts[0])  # The first prompt of a server is slow.
            idle_ttft_s = await _ttft_s(client, long_prompt)
            return await _amid(client, short_prompts, long_prompt, idle_ttft_s)


async def _amid(
    client: AsyncClient,
    short_prompts: Sequence[Sequence[int]],
    long_prompt: Sequence[int],
    idle_ttft_s: float,
) -> Amid:
    arrivals: list[list[float]] = [[] for _ in short_prompts]

    async def read(index: int) -> None:
        generation = client.generate(
            short_prompts[index],
            max_tokens=ENDLESS_TOKENS,
            temperature=0,
            ignore_eos=True,
            detokenise=False,
        )
        async with generation:
            while await generation.read():
                arrivals[index].append(time.perf_counter())

    async with trio.open_nursery() as nursery:
        for index in range(len(short_prompts)):
            nursery.start_soon(read, index)
        # What is waited for is in lists, which nothing announces.
        while any(len(times) < TOKENS_BEFORE_STEADY for times in arrivals):  # noqa: ASYNC110
            await trio.sleep(0.05)
        steady = time.perf_counter()
        await trio.sleep(STEADY_S)
        arrived = time.perf_counter()
        ttft_s = await _ttft_s(client, long_prompt)
        ended = time.perf_counter()
        nursery.cancel_scope.cancel()
    usual = gaps_between(arrivals, steady, arrived)
    amid = gaps_between(arrivals, arrived, ended)
    return Amid(
        usual_gap_s=median(usual),
        p99_gap_s=quantiles(amid, n=100)[-1],
        worst_gap_s=max(amid),
        ttft_s=ttft_s,
        idle_ttft_s=idle_ttft_s,
    )


def gaps_between(arrivals: Sequence[Sequence[float]], begin: float, end: float) -> list[float]:
    """Times between arrivals of the same stream, as far as they are within [begin, end].

    A gap that is under way at `end` counts with what of it there has been by then.
    """
    gaps: list[float] = []
    for times in arrivals:
        for one, other in pairwise((*times, end)):
            if other > begin and one < end:
                gaps.append(min(other, end) - one)
    return gaps


async def _ttft_s(client: AsyncClient, prompt: Sequence[int]) -> float:
    begin = time.perf_counter()
    generation = client.generate(
        prompt,
        max_tokens=LONG_OUTPUT_TOKENS,
        temperature=0,
        ignore_eos=True,
        detokenise=False,
    )
    async with generation:
        await generation.read()
        return time.perf_counter() - begin


if __name__ == "__main__":
    main()
