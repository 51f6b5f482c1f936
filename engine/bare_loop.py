"""The same model without sockets, scheduler or row table: what a benchmark compares with.

It launches the batches that a worker would, with pages of its own, and takes the greedy
token of each row. So the ratio of a server's speed to its speed is what serving costs.
"""

import time
from collections.abc import Sequence

import torch

from tidegate.engine.batch import Batch, RowPages, Segment
from tidegate.engine.models.registry import Model
from tidegate.engine.sampler import Draw, sample_finite
from tidegate.ipc.protocol import Sampling
from tidegate.kvcache.layout import Layout, Tokens
from tidegate.kvcache.page_store import PageStore

_GREEDY = Draw(Sampling(), 0)


class BareLoop:
    """Runs `model` on pools that it makes anew for each measurement.

    Prompts are pseudorandom tokens below `vocab_size`.
    """

    def __init__(
        self, model: Model, layout: Layout, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self._model = model
        self._layout = layout
        self._vocab_size = vocab_size
        self._device = torch.device(device)

    def prefill_tokens_per_s(
        self, prompt_tokens: int, prompt_count: int, chunk_tokens: int | None
    ) -> float:
        """Speed of prompts one after another, in chunks, each to its first token."""
        rows = _Rows(self._layout, self._device, 1, prompt_tokens)
        prompts = [self._prompt(prompt_tokens, seed) for seed in range(prompt_count)]
        self._prefill(rows, 0, self._prompt(prompt_tokens, prompt_count), chunk_tokens)
        begin = time.perf_counter()
        for prompt in prompts:
            self._prefill(rows, 0, prompt, chunk_tokens)
        seconds = time.perf_counter() - begin
        rows.store.close()
        return prompt_tokens * prompt_count / seconds

    def decode_tokens_per_s(
        self, row_count: int, context_tokens: int, step_count: int, chunk_tokens: int = 512
    ) -> float:
        """Speed of all rows together, each with `context_tokens` positions at the start."""
        rows = self.begin_decoding(row_count, context_tokens, step_count + 1, chunk_tokens)
        rows.tokens_per_s(row_count, 1)
        speed = rows.tokens_per_s(row_count, step_count)
        rows.close()
        return speed

    def begin_decoding(
        self,
        row_count: int,
        context_tokens: int,
        step_count_max: int,
        chunk_tokens: int | None = 512,
    ) -> "BareDecode":
        """Prefill rows for measurements of `step_count_max` steps in all."""
        rows = _Rows(self._layout, self._device, row_count, context_tokens + step_count_max)
        tokens = [
            self._prefill(rows, row, self._prompt(context_tokens, row), chunk_tokens)
            for row in range(row_count)
        ]
        return BareDecode(self, rows, tokens, context_tokens)

    def _prefill(
        self, rows: "_Rows", row: int, prompt: Sequence[int], chunk_tokens: int | None
    ) -> int:
        size = chunk_tokens or len(prompt)
        token = 0
        for start in range(0, len(prompt), size):
            part = prompt[start : start + size]
            is_last = start + size >= len(prompt)
            segment = Segment(part, start, is_last, rows.pages[row])
            sampled = self.launch(rows.store, [segment])
            token = sampled[0] if is_last else token
        return token

    def launch(self, store: PageStore, segments: Sequence[Segment]) -> list[int]:
        """Run one batch; returns the greedy token of each segment that samples."""
        batch = Batch.build(segments, self._layout, self._device)
        logits = self._model.forward(batch, store)
        tokens = sample_finite(logits, [_GREEDY] * logits.shape[0])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [token for token in tokens if token is not None]

    def _prompt(self, length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, self._vocab_size, (length,), generator=generator)
        return [int(token) for token in drawn]


class BareDecode:
    """Rows that have been prefilled. Each measurement goes on where the rows are."""

    def __init__(
        self, loop: BareLoop, rows: "_Rows", tokens: list[int], context_tokens: int
    ) -> None:
        self._loop = loop
        self._rows = rows
        self._tokens = tokens
        self._context_tokens = context_tokens
        self._positions = [context_tokens] * len(tokens)

    def tokens_per_s(self, row_count: int, step_count: int) -> float:
        """Speed of the first `row_count` rows together."""
        begin = time.perf_counter()
        for _ in range(step_count):
            segments = [
                Segment((self._tokens[row],), self._positions[row], True, self._rows.pages[row])
                for row in range(row_count)
            ]
            self._tokens[:row_count] = self._loop.launch(self._rows.store, segments)
            for row in range(row_count):
                self._positions[row] += 1
        return row_count * step_count / (time.perf_counter() - begin)

    def rewind(self) -> None:
        """Go back to where the prompts end, so that the next measurement is as long."""
        self._positions = [self._context_tokens] * len(self._tokens)

    def close(self) -> None:
        self._rows.store.close()


class _Rows:
    """A store with pages for `row_count` rows of up to `token_count` positions each."""

    def __init__(
        self, layout: Layout, device: torch.device, row_count: int, token_count: int
    ) -> None:
        per_row = [int(group.pages(Tokens(token_count))) for group in layout.groups]
        self.store = PageStore(layout, [count * row_count for count in per_row], device)
        self.pages = [
            tuple(RowPages(0, range(row * count, (row + 1) * count)) for count in per_row)
            for row in range(row_count)
        ]
