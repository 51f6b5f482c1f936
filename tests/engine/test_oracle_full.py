"""The real models in float32 on all of the oracle's prompts."""

from itertools import cycle, islice

import pytest

from fakes.oracle_run import judge, load, run
from oracle.cases import oracle

PAGE_COUNT = 1400  # Enough for all prompts in the full pool at once.
CHUNKS = (512, 64, 100, 4096)
TIES_SHARE_MAX = 1 / 20


def check(model_name: str, device: str = "cpu") -> None:
    cases = oracle(model_name).cases
    assert len(cases) >= 20
    chunks = list(islice(cycle(CHUNKS), len(cases)))
    outcomes = run(load(model_name, PAGE_COUNT, device), cases, chunks)
    equal = [judge(case, outcome) for case, outcome in zip(cases, outcomes, strict=True)]
    assert equal.count(False) <= len(cases) * TIES_SHARE_MAX


@pytest.mark.slow
@pytest.mark.parametrize("model_name", ["gemma3-270m", "smollm2-135m"])
def test_greedy_tokens_and_logits_are_those_of_transformers_for_every_prompt(
    model_name: str,
) -> None:
    check(model_name)


@pytest.mark.cuda
@pytest.mark.parametrize("model_name", ["gemma3-270m", "smollm2-135m"])
def test_a_gpu_gives_the_tokens_and_logits_of_transformers_for_every_prompt(
    model_name: str,
) -> None:
    check(model_name, "cuda")
