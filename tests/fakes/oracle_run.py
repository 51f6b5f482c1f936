"""Runs a real model over prompts of the oracle, and judges its tokens and logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fakes.paged_rows import Feed, PagedRow, PagedRows
from oracle.cases import Case
from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.engine.checkpoint.weights import load_weights
from tidegate.engine.models.registry import build_model, layout_for

LOGIT_DIFFERENCE_MAX = 1e-3
# Where the oracle's two best logits are this near, another order of sums may pick the other.
TIE_MARGIN_MAX = 1e-3
PAGE_TOKENS = 16


@dataclass
class Outcome:
    tokens: list[int]
    logits: list[torch.Tensor]  # [vocabulary] for each token.


def load(model_name: str, page_count: int, device: str = "cpu") -> tuple[PagedRows, PagedRows]:
    """Two pools, to hand over from the first to the second, and one float32 model."""
    checkpoint = open_checkpoint(model_name)
    weights = load_weights(checkpoint, torch.float32)
    model = build_model(checkpoint.config, weights, device, "float32")
    layout = layout_for(checkpoint.config, PAGE_TOKENS, "float32")
    source, target = (
        PagedRows(model, layout, page_count, device=device, seed=seed) for seed in (1, 2)
    )
    return source, target


def run(
    pools: tuple[PagedRows, PagedRows], cases: Sequence[Case], chunks: Sequence[int]
) -> list[Outcome]:
    """Greedy continuations: prompts in chunks of `chunks[i]` tokens, one after the other, each
    then handed over; all decode together.
    """
    source, target = pools
    rows: list[PagedRow] = []
    outcomes: list[Outcome] = []
    for case, chunk in zip(cases, chunks, strict=True):
        row = source.start()
        logits = torch.empty(0)
        while row.length < len(case.prompt):
            logits = source.launch([Feed(row, case.prompt[row.length : row.length + chunk])])
        rows.append(target.hand_off(row, source))
        source.drop(row)
        outcomes.append(Outcome([int(logits[0].argmax())], [logits[0]]))
    for _ in range(len(cases[0].tokens) - 1):
        last = [outcome.tokens[-1:] for outcome in outcomes]
        logits = target.launch([Feed(*pair) for pair in zip(rows, last, strict=True)])
        for outcome, row_logits in zip(outcomes, logits, strict=True):
            outcome.tokens.append(int(row_logits.argmax()))
            outcome.logits.append(row_logits.clone())
    return outcomes


def judge(case: Case, outcome: Outcome) -> bool:
    """Whether the tokens are the oracle's; False if they part at a tie.

    Fails if they part elsewhere, or if a logit differs before they do.
    """
    agreed = [ours == theirs for ours, theirs in zip(outcome.tokens, case.tokens, strict=True)]
    parted = len(agreed) if all(agreed) else agreed.index(False)
    for top in case.top:
        if top.step <= parted and top.step < len(agreed):
            ours = outcome.logits[top.step][top.ids]
            difference = (ours - torch.tensor(top.values)).abs().max().item()
            assert difference <= LOGIT_DIFFERENCE_MAX, (len(case.prompt), top.step, difference)
    if parted == len(agreed):
        return True
    assert case.margins[parted] <= TIE_MARGIN_MAX, (len(case.prompt), parted)
    return False
