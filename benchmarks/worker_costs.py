"""Measures what launches of a real worker cost, for benchmarks in virtual time.

Launches of many shapes go through the engine as a worker makes them: a batch is built, the
model runs, tokens are sampled. The pages' content does not matter for the time. Times are
those of this thread's CPU, and the best of several, so that a machine's neighbours disturb
little; so it runs on one thread. The copy between pools is a memmove, as on one host.

    python benchmarks/worker_costs.py                  # prints; about two minutes
    python benchmarks/worker_costs.py --write          # and replaces worker_costs.json
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import msgspec
import torch
from msgspec.structs import asdict

from cost_model import COSTS_FILE, Costs, Measured, Work, chunk_work, decode_work, fit
from first_light import memcpy_gb_per_s
from tidegate.engine.bare_loop import BareLoop
from tidegate.engine.batch import RowPages, Segment
from tidegate.engine.loading import load_engine
from tidegate.engine.settings import WorkerSettings
from tidegate.ipc.protocol import Role, WorkerId
from tidegate.kvcache.layout import Group, Layout, Pages, Tokens
from tidegate.kvcache.page_store import PageStore

CHUNK_TOKENS = (64, 256, 512)
CHUNK_STARTS = (0, 2048, 8192)
ROW_COUNTS = (1, 8, 32)
ROW_CONTEXTS = (512, 2048, 8192)
TOKEN = 5  # Any: what a token is makes no difference to the time.


class Launches:
    """The launches of a model, on pools that are made anew for each."""

    def __init__(self, model: str, dtype: str, repeat_count: int) -> None:
        settings = WorkerSettings(
            model=model,
            role=Role.BOTH,
            name=WorkerId("measured"),
            endpoint="",
            dtype=dtype,
            kv_memory=2**28,
            threads=1,
        )
        engine = load_engine(settings, lambda line: print(line, file=sys.stderr))
        engine.store.close()
        self._layout: Layout = engine.layout
        self._loop = BareLoop(engine.model, engine.layout, engine.card.vocab_size)
        self._repeat_count = repeat_count

    def us(self, row_count: int, start: int, count: int, *, samples: bool) -> float:
        """The time of a launch of `row_count` rows with `count` tokens each after `start`."""
        end = Tokens(start + count)
        firsts = [group.page_of(group.first_needed(Tokens(start))) for group in self._groups]
        per_row = [
            group.pages(end) - first for group, first in zip(self._groups, firsts, strict=True)
        ]
        store = PageStore(self._layout, [each * row_count for each in per_row], "cpu")
        segments = [
            Segment([TOKEN] * count, start, samples, self._tables(row, firsts, per_row))
            for row in range(row_count)
        ]
        self._loop.launch(store, segments)
        times: list[int] = []
        for _ in range(self._repeat_count):
            begin = time.thread_time_ns()
            self._loop.launch(store, segments)
            times.append(time.thread_time_ns() - begin)
        store.close()
        return min(times) / 1e3

    @property
    def _groups(self) -> Sequence[Group]:
        return self._layout.groups

    def _tables(
        self, row: int, firsts: Sequence[Pages], per_row: Sequence[int]
    ) -> tuple[RowPages, ...]:
        return tuple(
            RowPages(first, range(row * count, (row + 1) * count))
            for first, count in zip(firsts, per_row, strict=True)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=4, help="of each launch")
    parser.add_argument("--write", action="store_true", help=f"write {COSTS_FILE.name}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    launches = Launches(arguments.model, arguments.dtype, arguments.repeats)
    works, times_us = measure(launches)
    costs, error = fit(works, times_us, memcpy_gb_per_s() * 1e3)
    print(f"{'launch':40}{'measured ms':>12}{'formula ms':>12}")
    for work, time_us in zip(works, times_us, strict=True):
        print(f"{name_of(work):40}{time_us / 1e3:12.1f}{costs.us(work) / 1e3:12.1f}")
    found = Measured(
        model=arguments.model,
        dtype=arguments.dtype,
        threads=1,
        how="benchmarks/worker_costs.py: launches of the real engine on one CPU thread",
        error_mean=round(error, 3),
        costs=Costs(**{name: rounded(each) for name, each in asdict(costs).items()}),
    )
    if arguments.write:
        text = msgspec.json.format(msgspec.json.encode(found), indent=2)
        COSTS_FILE.write_bytes(text + b"\n")
    figures = {**asdict(found.costs), "error_mean": found.error_mean}
    print(json.dumps({"benchmark": "worker_costs", "figures": figures}))


def measure(launches: Launches) -> tuple[list[Work], list[float]]:
    """Launches of one chunk each, then of rows that decode."""
    works: list[Work] = []
    times_us: list[float] = []
    for start in CHUNK_STARTS:
        for count in CHUNK_TOKENS:
            for samples in (False, True):
                works.append(chunk_work(start, start + count, samples=samples))
                times_us.append(launches.us(1, start, count, samples=samples))
    for context in ROW_CONTEXTS:
        for row_count in ROW_COUNTS:
            works.append(decode_work(row_count, row_count * context))
            times_us.append(launches.us(row_count, context - 1, 1, samples=True))
    return works, times_us


def rounded(value: float) -> float:
    """To four figures: a measurement has no more."""
    return float(f"{value:.4g}")


def name_of(work: Work) -> str:
    """The launch in words."""
    if work.prompt_tokens:
        start = work.prompt_pairs / work.prompt_tokens - work.prompt_tokens / 2
        sampled = ", sampled" if work.sampled_rows else ""
        return f"{work.prompt_tokens} prompt tokens after {start:,.0f}{sampled}"
    context = work.row_context / work.sampled_rows
    return f"{work.sampled_rows} rows decode at {context:,.0f}"


if __name__ == "__main__":
    main()
