"""Chooses each row's next token from its logits.

The choice is a function of (logits, sampling, seed, output index) alone: every kept token
gets Gumbel noise hashed from (seed, output index, token id), and the largest sum of scaled
logit and noise wins. So it does not depend on who else is in the batch or on which worker
samples. Tokens are kept by top-k, then top-p among those, then min-p; equal logits are
ranked by token id, so that each filter keeps one definite set.
"""

import math
from collections.abc import Sequence

import msgspec
import torch

from tidegate.engine.noise import gumbel, least_count, row_key, uniform_counts
from tidegate.ipc.protocol import Sampling

# Below this a scaled gap of a hundredth of a logit is 1000: the result is the greedy one.
GREEDY_TEMPERATURE_MAX = 1e-5
# Logits looked at in one pass: on a CPU the working set has to stay in the cache.
PASS_LOGITS_MAX = {"cpu": 2**18, "cuda": 2**25}
RUN_LOGITS = 512  # Runs of ids in which a CPU looks for the largest logit.
SLICE_COUNTS_MAX = {"cpu": 2**16, "cuda": 2**25}  # The same for integer noise.
FIRST_CANDIDATES = 256  # Ranked tokens looked at first; most rows need no more.
CANDIDATES_GROWTH = 16
RACE_LEADERS = 64
# Weights are summed as integers, so that a sum does not depend on the order of addition.
WEIGHT_ONE = 2.0**40


class Draw(msgspec.Struct, frozen=True, gc=False):
    """How one row of logits is sampled; `output_index` counts the tokens sampled before."""

    sampling: Sampling
    output_index: int


def sample_finite(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """A token id for each row of `logits`, float32 [len(draws), vocabulary].

    None for a row with a logit that is not finite.
    """
    finite = finite_rows(logits)
    if all(finite):
        return list(sample(logits, draws))
    good = [index for index, is_finite in enumerate(finite) if is_finite]
    tokens: list[int | None] = [None] * len(draws)
    if good:
        sampled = sample(_rows_of(logits, good), [draws[index] for index in good])
        for index, token in zip(good, sampled, strict=True):
            tokens[index] = token
    return tokens


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """A token id for each row of `logits`, float32 [len(draws), vocabulary], all finite."""
    assert logits.shape[0] == len(draws), (logits.shape, len(draws))
    tokens = [0] * len(draws)
    greedy = [i for i, draw in enumerate(draws) if _is_greedy(draw.sampling)]
    ranked = [i for i, draw in enumerate(draws) if _is_ranked(draw.sampling)]
    others = set(greedy) | set(ranked)
    open_rows = [i for i in range(len(draws)) if i not in others]
    if greedy:
        _assign(tokens, greedy, _integers(largest(_rows_of(logits, greedy))))
    for rows in _passes(ranked, logits):
        part = [draws[i] for i in rows]
        _assign(tokens, rows, _sample_ranked(_rows_of(logits, rows), part))
    for rows in _passes(open_rows, logits):
        part = [draws[i] for i in rows]
        _assign(tokens, rows, _sample_open(_rows_of(logits, rows), part))
    return tokens


def finite_rows(logits: torch.Tensor) -> list[bool]:
    """For each row of float32 [rows, vocabulary]: are all its logits finite?"""
    # No sum of a value that is not finite is finite. The sum of large finite ones may not be.
    if bool(torch.isfinite(logits.sum(dim=1)).all()):
        return [True] * logits.shape[0]
    # The largest and the smallest value are NaN if any value is.
    finite = torch.isfinite(logits.amax(dim=1)) & torch.isfinite(logits.amin(dim=1))
    return [bool(value) for value in _integers(finite)]


def largest(logits: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: the id of the largest logit of each row, the least id among equals.

    On a CPU `argmax` takes five times as long as `amax`. So the largest value of each run of
    ids is found first, and then where it is, in one run.
    """
    rows, vocabulary = logits.shape
    size = RUN_LOGITS
    if logits.device.type != "cpu" or vocabulary < size:
        return logits.argmax(dim=1)
    whole = vocabulary // size * size
    runs = logits[:, :whole].view(rows, whole // size, size)
    peaks = runs.amax(dim=2)
    places = peaks.argmax(dim=1)
    ids = places * size + runs[torch.arange(rows), places].argmax(dim=1)
    if whole < vocabulary:
        rest = logits[:, whole:]
        is_later = rest.amax(dim=1) > peaks.amax(dim=1)
        ids = torch.where(is_later, whole + rest.argmax(dim=1), ids)
    return ids


def _is_greedy(sampling: Sampling) -> bool:
    # Written so that a NaN is greedy too.
    return not sampling.temperature > GREEDY_TEMPERATURE_MAX


def _is_ranked(sampling: Sampling) -> bool:
    filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return filters and not _is_greedy(sampling)


def _rows_of(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    if len(rows) == logits.shape[0]:
        return logits
    return logits[torch.tensor(rows, device=logits.device)]


def _passes(rows: list[int], logits: torch.Tensor) -> list[list[int]]:
    """`rows` in runs that one pass can take."""
    size = max(1, PASS_LOGITS_MAX[logits.device.type] // logits.shape[1])
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def _assign(tokens: list[int], rows: list[int], values: list[int]) -> None:
    for row, value in zip(rows, values, strict=True):
        tokens[row] = value


def _integers(values: torch.Tensor) -> list[int]:
    # torch declares the result as a bare list.
    return values.tolist()  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]


class _Parameters:
    """Sampling parameters of some rows as columns [rows, 1]."""

    def __init__(self, draws: Sequence[Draw], vocabulary: int, device: torch.device) -> None:
        def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        samplings = [draw.sampling for draw in draws]
        self.temperature = column([s.temperature for s in samplings], torch.float64)
        self.top_p = column([max(0.0, s.top_p) for s in samplings], torch.float64)
        self.log_min_p = column(
            [math.log(s.min_p) if s.min_p > 0 else -math.inf for s in samplings], torch.float64
        )
        self.has_top_k = column([int(s.top_k > 0) for s in samplings], torch.bool)
        self.top_k = column(
            [min(s.top_k, vocabulary) if s.top_k > 0 else vocabulary for s in samplings],
            torch.int64,
        )
        self.keys = column(
            [row_key(draw.sampling.seed, draw.output_index) for draw in draws], torch.int64
        )


def _sample_ranked(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """Rows with filters: only the best tokens are ranked, more of them until it suffices."""
    vocabulary = logits.shape[1]
    tokens = [0] * len(draws)
    rows = list(range(len(draws)))
    largest_top_k = max(draw.sampling.top_k for draw in draws)
    # Room beyond top-k lets most ties at its edge be settled in the first round.
    width = min(vocabulary, max(FIRST_CANDIDATES, largest_top_k + largest_top_k // 8))
    while rows:
        part = [draws[i] for i in rows]
        chosen, settled = _sample_among(_rows_of(logits, rows), part, width)
        for row, token, is_settled in zip(rows, chosen, settled, strict=True):
            if is_settled:
                tokens[row] = token
        rows = [row for row, is_settled in zip(rows, settled, strict=True) if not is_settled]
        assert not rows or width < vocabulary
        width = min(vocabulary, width * CANDIDATES_GROWTH)
    return tokens


def _sample_among(
    logits: torch.Tensor, draws: list[Draw], width: int
) -> tuple[list[int], list[bool]]:
    """Sample among the `width` best tokens; False where the kept set may reach beyond them."""
    parameters = _Parameters(draws, logits.shape[1], logits.device)
    values, ids = _best(logits, width)
    rank = torch.arange(width, device=logits.device)[None]
    top = values[:, :1].double()
    scaled = (values.double() - top) / parameters.temperature
    weights = (scaled.exp() * WEIGHT_ONE).long() * (rank < parameters.top_k)
    total = weights.sum(dim=1, keepdim=True)
    open_ended = (parameters.top_p < 1) & ~parameters.has_top_k
    if width < logits.shape[1] and bool(open_ended.any()):
        everything = ((logits.double() - top) / parameters.temperature).exp() * WEIGHT_ONE
        total = torch.where(open_ended, everything.long().sum(dim=1, keepdim=True), total)
    before = weights.cumsum(dim=1) - weights
    kept = (
        (rank < parameters.top_k)
        & ((parameters.top_p >= 1) | (before < parameters.top_p * total))
        & (scaled >= parameters.log_min_p)
    )
    kept[:, 0] = True
    # `kept` is a run from the best token on. Where it takes in the last value, tokens of the
    # same value or lower ones may be missing from the candidates.
    complete = width == logits.shape[1]
    certain = ~(kept & (values == values[:, -1:])).any(dim=1)
    settled = [True] * len(draws) if complete else [bool(value) for value in _integers(certain)]
    noise = gumbel(uniform_counts(parameters.keys, ids))
    scores = torch.where(kept, scaled + noise, -math.inf)
    chosen = ids.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]
    return _integers(chosen), settled


def _best(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` best values of each row with their ids, best first, equal ones by id."""
    if width == logits.shape[1]:
        ordered = torch.sort(logits, dim=1, descending=True, stable=True)
        return ordered.values, ordered.indices
    found = torch.topk(logits, width, dim=1)
    ids = found.indices.sort(dim=1).values
    ordered = torch.sort(logits.gather(1, ids), dim=1, descending=True, stable=True)
    return ordered.values, ids.gather(1, ordered.indices)


def _sample_open(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """Rows without filters: every token of the vocabulary takes part.

    The score of the leaders is a bar. A token behind them clears it only with noise of at
    least bar - leaders' lowest logit, which few counts reach, so logarithms are taken for few.
    """
    vocabulary = logits.shape[1]
    parameters = _Parameters(draws, vocabulary, logits.device)
    leaders = torch.topk(logits, min(RACE_LEADERS, vocabulary), dim=1)
    top = leaders.values[:, :1].double()
    scaled = (leaders.values.double() - top) / parameters.temperature
    scores = scaled + gumbel(uniform_counts(parameters.keys, leaders.indices))
    needed = scores.amax(dim=1, keepdim=True) - scaled[:, -1:] - 1e-6
    rows, ids, counts = _loud_tokens(parameters.keys, least_count(needed), vocabulary)
    late_scaled = (logits[rows, ids].double() - top[rows, 0]) / parameters.temperature[rows, 0]
    late_scores = late_scaled + gumbel(counts)
    every_row = torch.arange(len(draws), device=logits.device)
    all_rows = torch.cat([every_row.repeat_interleave(leaders.indices.shape[1]), rows])
    all_ids = torch.cat([leaders.indices.flatten(), ids])
    all_scores = torch.cat([scores.flatten(), late_scores])
    best = torch.full_like(top[:, 0], -math.inf)
    best = best.scatter_reduce(0, all_rows, all_scores, "amax")
    winners = torch.where(all_scores == best[all_rows], all_ids, vocabulary)
    chosen = torch.full_like(every_row, vocabulary).scatter_reduce(0, all_rows, winners, "amin")
    return _integers(chosen)


def _loud_tokens(
    keys: torch.Tensor, least: torch.Tensor, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row, id and count of each token whose count is at least its row's `least`."""
    device = keys.device
    size = max(1, SLICE_COUNTS_MAX[device.type] // keys.shape[0])
    rows: list[torch.Tensor] = []
    ids: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    for first in range(0, vocabulary, size):
        slice_ids = torch.arange(first, min(first + size, vocabulary), device=device)
        counts = uniform_counts(keys, slice_ids[None])
        slice_rows, columns = (counts >= least).nonzero(as_tuple=True)
        rows.append(slice_rows)
        ids.append(columns + first)
        found.append(counts[slice_rows, columns])
    return torch.cat(rows), torch.cat(ids), torch.cat(found)
