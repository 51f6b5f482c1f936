"""Greedy tokens of the real models by transformers in float32, kept as JSON files."""

from functools import cache
from pathlib import Path

import msgspec

FIXTURES = Path(__file__).with_name("fixtures")


class TopLogits(msgspec.Struct, frozen=True):
    """The best logits of one step, best first."""

    step: int
    ids: list[int]
    values: list[float]


class Case(msgspec.Struct, frozen=True):
    """A prompt (with the begin token, if the model has one) and its greedy continuation.

    `margins[i]` is by how much token i's logit is better than the second best. End tokens
    do not end a continuation.
    """

    prompt: list[int]
    tokens: list[int]
    margins: list[float]
    top: list[TopLogits]


class Oracle(msgspec.Struct, frozen=True):
    model: str
    cases: list[Case]


@cache
def oracle(model: str) -> Oracle:
    """The fixture of "gemma3-270m" or "smollm2-135m"."""
    return msgspec.json.decode((FIXTURES / f"{model}.json").read_bytes(), type=Oracle)
