"""Tiny models of each family on a whole server: the greedy tokens are transformers'.

With a hand-off, with both values of the flag where there are window layers, and with pages that
hold NaN once they are free.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from transformers import AutoModelForCausalLM

from end_to_end.serving import serve
from fakes.tiny_family import logits_of
from oracle.make_tiny_checkpoint import VOCAB_SIZE, TinyFamily, make_tiny_checkpoint
from tidegate import AsyncClient

# Around pages of 8, chunks of 32 and windows of 32; all at once.
LENGTHS = (1, 7, 8, 31, 32, 33, 65, 150)
NEW_TOKENS = 40  # More than a window.
MARGIN_MAX = 1e-3  # Where the two best logits are closer, either may come first.
OPTIONS = (
    *("--dtype", "float32"),
    *("--page-tokens", "8"),
    *("--chunk-tokens", "32"),
    *("--kv-memory", "64MiB"),
    "--poison-freed-pages",
)
RUNS: list[tuple[TinyFamily, str | None]] = [
    ("llama", None),
    ("gemma3", "true"),
    ("gemma3", "false"),
    ("gemma4", "true"),
    ("gemma4", "false"),
    ("gpt_oss", "true"),
    ("gpt_oss", "false"),
    ("mimo_v2", "true"),
    ("mimo_v2", "false"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def folder_of(root: Path, family: TinyFamily) -> Path:
    return make_tiny_checkpoint(root / family, family)


@cache
def reference_of(root: Path, family: TinyFamily) -> Any:
    auto_model: Any = AutoModelForCausalLM  # Its own types are partial.
    return auto_model.from_pretrained(
        folder_of(root, family), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def prompts() -> list[list[int]]:
    return [
        [(7 + 5 * n * n + length) % VOCAB_SIZE for n in range(length)] for length in LENGTHS
    ]


async def ask(endpoint: str) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()] * len(LENGTHS)
    async with AsyncClient(endpoint) as client, trio.open_nursery() as nursery:

        async def one(index: int, prompt: list[int]) -> None:
            result = await client.complete(
                prompt, max_tokens=NEW_TOKENS, ignore_eos=True, detokenise=False
            )
            found[index] = result.token_ids

        for index, prompt in enumerate(prompts()):
            nursery.start_soon(one, index, prompt)
    return found


def assert_greedy(reference: Any, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Each token is the reference's best after all before it, or nearly so."""
    assert len(tokens) == NEW_TOKENS
    logits = logits_of(reference, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    behind = logits.max(dim=1).values - logits[torch.arange(NEW_TOKENS), list(tokens)]
    assert behind.max().item() <= MARGIN_MAX, (len(prompt), behind)


@pytest.mark.parametrize(("family", "flag"), RUNS)
def test_the_tokens_of_a_server_are_those_of_the_reference(
    root: Path, family: TinyFamily, flag: str | None
) -> None:
    flags = () if flag is None else ("--swa-only-transfer", flag)
    with serve(str(folder_of(root, family)), *OPTIONS, *flags) as server:
        found = trio.run(ask, server.endpoint)
        assert not server.lines("row_fault")
        handoffs = server.lines("handoff_done")
        server.wait_until_all_pages_are_free()
    assert len(handoffs) == len(LENGTHS)
    assert any(line["bytes_saved"] > 0 for line in handoffs) == (flag == "true")
    reference = reference_of(root, family)
    for prompt, tokens in zip(prompts(), found, strict=True):
        assert_greedy(reference, prompt, tokens)
    assert len({token for tokens in found for token in tokens}) > len(LENGTHS)
