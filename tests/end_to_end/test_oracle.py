"""Greedy tokens of a real server equal transformers', whatever the roles, chunks and batches.

The default run takes a pairwise slice of the settings, and some prompts for each; `-m slow`
takes every prompt with every setting.
"""

from collections.abc import Sequence

import pytest
import trio

from end_to_end.serving import serve
from oracle.cases import Case, oracle
from tidegate import AsyncClient

MARGIN_MAX = 1e-3  # Where the two best logits are closer, either may come first.
MODELS = ("gemma3-270m", "smollm2-135m")
ROLES = {"pd": (), "both": ("--role-both",)}
# Every pair of values of two settings occurs: model, roles, chunk tokens, requests at a time.
PAIRWISE = (
    ("gemma3-270m", "pd", "64", 1),
    ("smollm2-135m", "pd", "512", 8),
    ("smollm2-135m", "pd", "none", 1),
    ("smollm2-135m", "both", "64", 8),
    ("gemma3-270m", "both", "512", 1),
    ("gemma3-270m", "both", "none", 8),
)
EVERY = tuple(
    (roles, chunk, count)
    for roles in ROLES
    for chunk in ("64", "512", "none")
    for count in (1, 8)
)
SLICE = {1: 2, 8: 8}  # Prompts of the default run, by requests at a time.


async def answers(
    endpoint: str, cases: Sequence[Case], at_a_time: int
) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()] * len(cases)
    turns = trio.CapacityLimiter(at_a_time)
    async with AsyncClient(endpoint) as client, trio.open_nursery() as nursery:

        async def ask(index: int) -> None:
            async with turns:
                result = await client.complete(
                    cases[index].prompt,
                    max_tokens=len(cases[index].tokens),
                    ignore_eos=True,
                    detokenise=False,
                )
                found[index] = result.token_ids

        for index in range(len(cases)):
            nursery.start_soon(ask, index)
    return found


def first_difference(case: Case, tokens: Sequence[int]) -> int | None:
    assert len(tokens) == len(case.tokens)
    pairs = enumerate(zip(tokens, case.tokens, strict=True))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), None)


def check(model: str, cases: Sequence[Case], roles: str, chunk: str, count: int) -> None:
    options = ("--dtype", "float32", "--chunk-tokens", chunk, *ROLES[roles])
    with serve(model, *options) as server:
        found = trio.run(answers, server.endpoint, cases, count)
        assert not server.lines("row_fault")
    near_ties = 0
    for case, tokens in zip(cases, found, strict=True):
        index = first_difference(case, tokens)
        if index is not None:
            text = f"prompt of {len(case.prompt)}: token {index}, margin {case.margins[index]}"
            assert case.margins[index] <= MARGIN_MAX, text
            near_ties += 1
    assert near_ties <= max(1, len(cases) // 20)


@pytest.mark.parametrize(("model", "roles", "chunk", "count"), PAIRWISE)
def test_a_slice_of_prompts_gives_the_oracles_tokens(
    model: str, roles: str, chunk: str, count: int
) -> None:
    cases = oracle(model).cases
    # Each setting takes other prompts, spread over all lengths.
    number = PAIRWISE.index((model, roles, chunk, count))
    step = len(cases) // SLICE[count]
    check(model, cases[number % step :: step], roles, chunk, count)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("roles", "chunk", "count"), EVERY)
def test_all_prompts_give_the_oracles_tokens(
    model: str, roles: str, chunk: str, count: int
) -> None:
    check(model, oracle(model).cases, roles, chunk, count)
