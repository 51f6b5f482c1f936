"""The bare loop launches what a worker would launch."""

import pytest
import torch

from fakes.tiny_model import VOCAB_SIZE, tiny_config, tiny_model
from tidegate.engine.bare_loop import BareLoop
from tidegate.engine.batch import Batch
from tidegate.engine.models.registry import layout_for
from tidegate.kvcache.page_store import PageStore


class Recorder:
    """A model that notes how many tokens each launch feeds and samples."""

    def __init__(self) -> None:
        self.config = tiny_config("gemma3")
        self._model = tiny_model(self.config)
        self.launches: list[tuple[int, int]] = []

    def forward(self, batch: Batch, store: PageStore) -> torch.Tensor:
        self.launches.append((batch.token_count, batch.sample_rows.shape[0]))
        return self._model.forward(batch, store)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def make_loop(recorder: Recorder) -> BareLoop:
    return BareLoop(recorder, layout_for(recorder.config, 8, "float32"), VOCAB_SIZE)


def test_prefill_runs_every_prompt_in_chunks_and_samples_once(recorder: Recorder) -> None:
    speed = make_loop(recorder).prefill_tokens_per_s(50, prompt_count=2, chunk_tokens=20)
    # One more prompt at the start warms up.
    assert recorder.launches == [(20, 0), (20, 0), (10, 1)] * 3
    assert speed > 0
    recorder.launches.clear()
    make_loop(recorder).prefill_tokens_per_s(50, prompt_count=1, chunk_tokens=None)
    assert recorder.launches == [(50, 1)] * 2


def test_decode_runs_all_rows_in_each_step(recorder: Recorder) -> None:
    speed = make_loop(recorder).decode_tokens_per_s(3, context_tokens=40, step_count=5)
    assert recorder.launches == [(40, 1)] * 3 + [(3, 3)] * 6
    assert speed > 0
