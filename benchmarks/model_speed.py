"""How fast a model's forward pass is on one device: prefill and decode, without any server.

    python benchmarks/model_speed.py gemma3-270m --threads 1

Times are those of the CPU of this thread on a CPU, so that other processes disturb less; use
one thread. The best of several runs is shown.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from tidegate.engine.batch import Batch, RowPages, Segment
from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.engine.checkpoint.weights import load_weights
from tidegate.engine.models.registry import build_model, layout_for
from tidegate.kvcache.layout import Tokens
from tidegate.kvcache.page_store import TORCH_DTYPES, PageStore

PAGE_TOKENS = 16
PAGE_COUNT = 2048
CONTEXT = 512  # Of decode steps.


class Bench:
    def __init__(self, model_name: str, dtype: str, device: str) -> None:
        checkpoint = open_checkpoint(model_name)
        weights = load_weights(checkpoint, TORCH_DTYPES[dtype])
        self.device = device
        self.model = build_model(checkpoint.config, weights, device, dtype)
        self.layout = layout_for(checkpoint.config, PAGE_TOKENS, dtype)
        self.store = PageStore(self.layout, [PAGE_COUNT for _ in self.layout.groups], device)
        shuffled = np.random.default_rng(0)
        self.pages = [shuffled.permutation(PAGE_COUNT) for _ in self.layout.groups]
        self.tokens = shuffled.integers(0, 1000, 4096)

    def prefill(self, length: int, chunk: int) -> None:
        count = self._page_count(length + 1)
        tables = tuple(RowPages(0, pages[:count]) for pages in self.pages)
        for first in range(0, length, chunk):
            tokens = self.tokens[first : min(first + chunk, length)]
            self._launch([Segment(tokens, first, first + chunk >= length, tables)])

    def decode(self, row_count: int) -> None:
        width = self._page_count(CONTEXT + 1)
        self._launch(
            [
                Segment(
                    [5],
                    CONTEXT,
                    True,
                    tuple(RowPages(0, ids[row * width :][:width]) for ids in self.pages),
                )
                for row in range(row_count)
            ]
        )

    def _page_count(self, tokens: int) -> int:
        return self.layout.groups[0].pages(Tokens(tokens))

    def _launch(self, segments: list[Segment]) -> None:
        self.model.forward(Batch.build(segments, self.layout, self.device), self.store)
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


def best_seconds(action: Callable[[], None], clock: Callable[[], float], count: int) -> float:
    action()
    times: list[float] = []
    for _ in range(count):
        start = clock()
        action()
        times.append(clock() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = Bench(options.model, options.dtype, options.device)
    one_thread = options.device == "cpu" and options.threads == 1
    clock = time.thread_time if one_thread else time.perf_counter
    for length, chunk in ((512, 512), (2048, 512), (2048, 2048)):
        seconds = best_seconds(partial(bench.prefill, length, chunk), clock, 5)
        print(f"prefill {length} tokens in chunks of {chunk}: {length / seconds:.0f} tokens/s")
    for row_count in (1, 8, 32):
        seconds = best_seconds(partial(bench.decode, row_count), clock, 15)
        print(f"decode at {CONTEXT} tokens, batch {row_count}: {seconds * 1e3:.1f} ms a step")


if __name__ == "__main__":
    main()
