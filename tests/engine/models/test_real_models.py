"""The real models in float32 on a few of the oracle's prompts."""

import pytest

from fakes.oracle_run import judge, load, run
from oracle.cases import oracle

# Within a page; around a chunk of 64; around a window and a page.
LENGTHS = {"gemma3-270m": (9, 65, 529), "smollm2-135m": (16, 63, 513)}
CHUNKS = (512, 64, 512)


@pytest.mark.parametrize("model_name", ["gemma3-270m", "smollm2-135m"])
def test_greedy_tokens_and_logits_are_those_of_transformers(model_name: str) -> None:
    by_length = {len(case.prompt): case for case in oracle(model_name).cases}
    cases = [by_length[length] for length in LENGTHS[model_name]]
    outcomes = run(load(model_name, page_count=60), cases, CHUNKS)
    assert all(judge(case, outcome) for case, outcome in zip(cases, outcomes, strict=True))
