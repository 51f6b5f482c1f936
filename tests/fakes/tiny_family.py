"""Tiny random models of any family, loaded from a Hugging Face folder as transformers saves it.

The reference is transformers' own model in float32, with the same weights.
"""

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fakes.paged_rows import PagedRows
from oracle.make_tiny_checkpoint import randomise
from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.checkpoint.hf_checkpoint import INDEX_FILE
from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.engine.checkpoint.weights import load_weights
from tidegate.engine.models.registry import Model, build_model, layout_for
from tidegate.kvcache.layout import Layout
from tidegate.kvcache.page_store import TORCH_DTYPES

DIFFERENCE_MAX = 2e-4  # Of a logit, from the reference's, in float32.
PAGE_COUNT = 3000  # Of each group, unless a case says otherwise.
SHARD_COUNT_MIN = 2


@dataclass(frozen=True, eq=False)
class TinyCase:
    """A configuration of transformers to be checked with pages of `page_tokens` positions.

    `config` makes it when it is asked for: as long as tests are only collected, nothing is
    made. `seed` draws the weights.
    """

    name: str
    config: Callable[[], Any]
    page_tokens: int
    seed: int = 0
    page_count: int = PAGE_COUNT

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class FamilyModels:
    """Our model of a case, and the reference."""

    config: ModelConfig
    model: Model
    layout: Layout
    reference: Any
    device: str
    page_count: int
    _expected: dict[tuple[int, ...], torch.Tensor] = field(
        default_factory=dict[tuple[int, ...], torch.Tensor]
    )

    def pool(self, seed: int) -> PagedRows:
        return PagedRows(self.model, self.layout, self.page_count, self.device, seed)

    def tokens(self, count: int, seed: int) -> list[int]:
        return random.Random(seed).choices(range(self.config.vocab_size), k=count)

    def expected(self, tokens: Sequence[int]) -> torch.Tensor:
        """The reference's logits [tokens, vocabulary], of one pass without a cache."""
        key = tuple(tokens)
        if key not in self._expected:
            self._expected[key] = logits_of(self.reference, key)
        return self._expected[key]

    def bfloat16_reference(self) -> Any:
        """The reference with its weights and its arithmetic in bfloat16."""
        return deepcopy(self.reference).to(torch.bfloat16)

    def with_forced_flag(self) -> "FamilyModels":
        """The same when an operator sets `swa_only_transfer` to false."""
        return replace(self, layout=self.layout.with_forced_flag(False))


def logits_of(reference: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of a model of transformers, in float32."""
    # Naming all rows, which changes nothing, keeps transformers from a short cut for layers
    # that share keys; it fails where these have no inputs of their own.
    kept = torch.arange(len(tokens))
    with torch.no_grad():
        result = reference(torch.tensor([tokens]), use_cache=False, logits_to_keep=kept)
    logits: torch.Tensor = result.logits[0].float()
    return logits


def is_close(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether each logit is as near as it must be; NaN is not."""
    assert logits.shape == expected.shape
    return (logits - expected).abs().max().item() <= DIFFERENCE_MAX


def assert_close(logits: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    """Raise `AssertionError`, which names `what`, unless each logit is near its own."""
    assert is_close(logits, expected), (what, (logits - expected).abs().max().item())


@cache
def load(case: TinyCase, dtype: str = "float32", device: str = "cpu") -> FamilyModels:
    """The case's models: transformers writes the folder, in several files, and we read it.

    Ours is in `dtype` on `device`; the reference is in float32 on the CPU.
    """
    auto_model: Any = AutoModelForCausalLM  # Its own types are partial.
    reference = auto_model.from_config(
        case.config(), attn_implementation="eager", experts_implementation="eager"
    )
    randomise(reference.float(), case.seed)
    byte_count = sum(weight.numel() for weight in reference.parameters()) * 4
    with TemporaryDirectory() as name:
        folder = Path(name)
        reference.save_pretrained(folder, max_shard_size=byte_count // SHARD_COUNT_MIN)
        assert (folder / INDEX_FILE).exists()
        checkpoint = open_checkpoint(name)
        weights = load_weights(checkpoint, TORCH_DTYPES[dtype])
        model = build_model(checkpoint.config, weights, device, dtype)
        assert not weights, f"weights that the model did not take: {list(weights)}"
        layout = layout_for(checkpoint.config, case.page_tokens, dtype)
        return FamilyModels(
            checkpoint.config, model, layout, reference.eval(), device, case.page_count
        )
