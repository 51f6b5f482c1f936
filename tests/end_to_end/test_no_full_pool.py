"""A model of window layers alone, as Mistral: no full pool is there to bound a prompt."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from transformers import MistralForCausalLM

from end_to_end.serving import serve
from oracle.make_tiny_checkpoint import make_tiny_checkpoint
from tidegate import AsyncClient
from tidegate.clients.library import RequestRefused

WINDOW = 40
POOL_TOKENS = 512
PROMPT_TOKENS = 1500
OUTPUT_TOKENS = 60
OPTIONS = (
    *("--dtype", "float32"),
    *("--window-pool-tokens", str(POOL_TOKENS)),
    *("--chunk-tokens", "128"),
    *("--max-running", "4"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("mistral") / "tiny", "llama")
    path = folder / "config.json"
    # The weights of the two are alike.
    own = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    config = json.loads(path.read_text()) | own | {"sliding_window": WINDOW}
    path.write_text(json.dumps(config))
    return folder


def prompt(length: int) -> list[int]:
    return [3 + 7 * index * index % 370 for index in range(length)]


def greedy(folder: Path) -> list[int]:
    """What transformers writes after the prompt."""
    model: Any = MistralForCausalLM
    tokens = torch.tensor([prompt(PROMPT_TOKENS)])
    loaded = model.from_pretrained(folder, dtype=torch.float32).eval()
    output = loaded.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        min_new_tokens=OUTPUT_TOKENS,
        max_new_tokens=OUTPUT_TOKENS,
        eos_token_id=None,
    )
    return [int(token) for token in output[0, PROMPT_TOKENS:]]


async def complete(client: AsyncClient, length: int) -> list[int]:
    result = await client.complete(
        prompt(length), max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenise=False
    )
    return list(result.token_ids)


def test_a_prompt_of_several_pools_runs_and_hands_over_its_window(folder: Path) -> None:
    expected = greedy(folder)
    with serve(str(folder), *OPTIONS) as server:

        async def ask() -> None:
            async with AsyncClient(server.endpoint) as client:
                assert await complete(client, PROMPT_TOKENS) == expected

        trio.run(ask)
        assert {pool["pool"] for pool in server.health()["pools"]} == {"window"}
        summary = server.lines("request_finished")[-1]
        assert summary["pages_window_peak"] <= POOL_TOKENS // 16
        # Positions 1461 to 1499 lie in three pages of 16, of 94 that the prompt fills.
        pages_moved = 3
        page_bytes = server.health()["pools"][0]["page_bytes"]
        assert summary["bytes_moved"] == pages_moved * page_bytes
        assert summary["bytes_saved"] == (94 - pages_moved) * page_bytes
        server.wait_until_all_pages_are_free()


def test_with_the_flag_false_the_window_pool_refuses_it(folder: Path) -> None:
    with serve(str(folder), *OPTIONS, "--swa-only-transfer", "false") as server:

        async def ask() -> None:
            async with AsyncClient(server.endpoint) as client:
                with pytest.raises(RequestRefused) as caught:
                    await complete(client, PROMPT_TOKENS)
                assert (caught.value.pool, caught.value.needed) == ("window", 94)
                assert len(await complete(client, POOL_TOKENS - 100)) == OUTPUT_TOKENS

        trio.run(ask)
