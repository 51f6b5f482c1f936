"""Tiny models of each kind on a whole server: the greedy tokens are transformers'.

With a hand-off, with both values of the flag where there are window layers, and with pages that
hold NaN once they are free. The default run takes a few kinds, `-m slow` the others.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from end_to_end.serving import serve
from fakes.tiny_family import logits_of
from oracle.make_tiny_checkpoint import VOCAB_SIZE
from oracle.make_tiny_models import TINY_MODELS, make_tiny_model
from tidegate import AsyncClient
from tidegate.clients.library import Result
from tidegate.engine.checkpoint.config import FAMILIES
from tidegate.engine.checkpoint.hf_checkpoint import INDEX_FILE

# Around pages of 8, chunks of 32 and windows of 32; all at once.
LENGTHS = (1, 7, 8, 31, 32, 33, 65, 150)
TEXT = "When the tide goes out again, the water rises."  # One more prompt.
NEW_TOKENS = 40  # More than a window.
MARGIN_MAX = 1e-3  # Where the two best logits are closer, either may come first.
OPTIONS = (
    *("--dtype", "float32"),
    *("--page-tokens", "8"),
    *("--chunk-tokens", "32"),
    *("--kv-memory", "64MiB"),
    "--poison-freed-pages",
)
DEFAULT_RUNS = (("gemma4", "true"), ("mimo_v2", "false"), ("deepseek_v4", "true"))
RUNS = tuple(
    (name, flag)
    for name, model in TINY_MODELS.items()
    for flag in (("true", "false") if model.has_windows else (None,))
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def folder_of(root: Path, name: str) -> Path:
    folder = make_tiny_model(root / name, name)
    assert (folder / INDEX_FILE).exists()
    return folder


@cache
def reference_of(root: Path, name: str) -> Any:
    auto_model: Any = AutoModelForCausalLM  # Its own types are partial.
    return auto_model.from_pretrained(
        folder_of(root, name), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def prompts() -> list[list[int]]:
    return [
        [(7 + 5 * n * n + length) % VOCAB_SIZE for n in range(length)] for length in LENGTHS
    ]


async def ask(endpoint: str) -> list[Result]:
    """The answers to all prompts, and to the text."""
    every: list[list[int] | str] = [*prompts(), TEXT]
    found: dict[int, Result] = {}
    async with AsyncClient(endpoint) as client, trio.open_nursery() as nursery:

        async def one(index: int, prompt: list[int] | str) -> None:
            found[index] = await client.complete(
                prompt,
                max_tokens=NEW_TOKENS,
                ignore_eos=True,
                detokenise=isinstance(prompt, str),
            )

        for index, prompt in enumerate(every):
            nursery.start_soon(one, index, prompt)
    return [found[index] for index in range(len(every))]


def assert_greedy(reference: Any, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Each token is the reference's best after all before it, or nearly so."""
    assert len(tokens) == NEW_TOKENS
    logits = logits_of(reference, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    behind = logits.max(dim=1).values - logits[torch.arange(NEW_TOKENS), list(tokens)]
    assert behind.max().item() <= MARGIN_MAX, (len(prompt), behind)


def check(root: Path, name: str, flag: str | None) -> None:
    folder = folder_of(root, name)
    flags = () if flag is None else ("--swa-only-transfer", flag)
    with serve(str(folder), *OPTIONS, *flags) as server:
        found = trio.run(ask, server.endpoint)
        assert not server.lines("row_fault")
        handoffs = server.lines("handoff_done")
        server.wait_until_all_pages_are_free()
    assert len(handoffs) == len(LENGTHS) + 1
    assert any(line["bytes_saved"] > 0 for line in handoffs) == (flag == "true")
    # Prompts of several chunks begin to move while they run.
    assert any(0 < line["bytes_early"] < line["bytes_moved"] for line in handoffs)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference, text = reference_of(root, name), tokenizer.encode(TEXT).ids
    for prompt, result in zip([*prompts(), text], found, strict=True):
        assert_greedy(reference, prompt, result.token_ids)
    assert found[-1].text == tokenizer.decode(list(found[-1].token_ids))
    # A server that mixed rows up, or a model that always says the same, would show.
    outputs = [result.token_ids for result in found]
    assert len(set(outputs)) == len(outputs)
    assert len({token for tokens in outputs for token in tokens}) > len(outputs)


@pytest.mark.parametrize("name", ["deepseek_v4"])
def test_the_tokens_are_the_same_whether_pages_move_early_or_late_or_not_at_all(
    root: Path, name: str
) -> None:
    folder = str(folder_of(root, name))
    outputs: list[list[tuple[int, ...]]] = []
    moved_early: list[int] = []
    for option in ("--early-handoff", "--no-early-handoff", "--role-both"):
        with serve(folder, *OPTIONS, option) as server:
            outputs.append([result.token_ids for result in trio.run(ask, server.endpoint)])
            moved_early.append(
                sum(line["bytes_early"] for line in server.lines("handoff_done"))
            )
            server.wait_until_all_pages_are_free()
    assert outputs[0] == outputs[1] == outputs[2]
    assert moved_early[0] > 0 and moved_early[1:] == [0, 0]


def test_every_family_is_among_the_tiny_models() -> None:
    assert {model.family for model in TINY_MODELS.values()} == set(FAMILIES)
    assert set(DEFAULT_RUNS) < set(RUNS)


@pytest.mark.parametrize(("name", "flag"), DEFAULT_RUNS)
def test_the_tokens_of_a_server_are_those_of_the_reference(
    root: Path, name: str, flag: str | None
) -> None:
    check(root, name, flag)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flag"), [run for run in RUNS if run not in DEFAULT_RUNS])
def test_the_tokens_of_every_other_server_are_too(
    root: Path, name: str, flag: str | None
) -> None:
    check(root, name, flag)
