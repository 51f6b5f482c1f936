"""What a launch of a worker costs in time: a formula with constants that were measured.

A launch takes

    launch_us
    + prompt_token_us for each prompt token of its chunks
    + prompt_pair_us for each pair of a prompt token and a position that it reads
    + sample_us if any row samples, as the output head's weights are read once
    + row_us for each row that samples
    + row_context_us for each position that a decoding row reads

A chunk of n tokens after c positions has n (c + n / 2) pairs. Window layers read no more than
their window, so what they cost is in the terms of a token and of a row. `benchmarks/
worker_costs.py` measures the constants and writes worker_costs.json.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

COSTS_FILE = Path(__file__).with_name("worker_costs.json")


class Work(msgspec.Struct, frozen=True):
    """What one launch does. Counts are of tokens, pairs and rows; contexts are summed up."""

    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    sampled_rows: int = 0
    row_context: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.prompt_tokens + other.prompt_tokens,
            self.prompt_pairs + other.prompt_pairs,
            self.sampled_rows + other.sampled_rows,
            self.row_context + other.row_context,
        )


def chunk_work(start: int, end: int, *, samples: bool) -> Work:
    """Of the prompt positions [start, end) of one row."""
    count = end - start
    return Work(count, count * (start + count / 2), int(samples), 0.0)


def decode_work(row_count: int, context: float) -> Work:
    """Of one step of rows that have `context` positions in all."""
    return Work(sampled_rows=row_count, row_context=context)


class Costs(msgspec.Struct, frozen=True):
    """The constants in microseconds, and the speed of copies between workers' pools."""

    launch_us: float
    prompt_token_us: float
    prompt_pair_us: float
    sample_us: float
    row_us: float
    row_context_us: float
    copy_bytes_per_us: float

    def us(self, work: Work) -> float:
        """How long a launch of this work takes."""
        return sum(
            term * constant
            for term, constant in zip(_terms(work), self._constants, strict=True)
        )

    def copy_us(self, byte_count: int) -> float:
        """How long it takes to copy pages of so many bytes."""
        return byte_count / self.copy_bytes_per_us

    def scaled(self, factor: float) -> "Costs":
        """Of a worker on which everything takes `factor` times as long, copies too."""
        return _costs(
            [constant * factor for constant in self._constants],
            self.copy_bytes_per_us / factor,
        )

    @property
    def _constants(self) -> tuple[float, ...]:
        return (
            self.launch_us,
            self.prompt_token_us,
            self.prompt_pair_us,
            self.sample_us,
            self.row_us,
            self.row_context_us,
        )


class Measured(msgspec.Struct, frozen=True):
    """A file of constants: how they were found, and how well they fit what was measured."""

    model: str
    dtype: str
    threads: int
    how: str
    error_mean: float  # Of the formula, as a share of the time measured.
    costs: Costs


def read_costs(path: Path = COSTS_FILE) -> Measured:
    """Raises `msgspec.ValidationError`, which names the field, for a file of another form."""
    return msgspec.json.decode(path.read_bytes(), type=Measured)


def fit(
    works: Sequence[Work], times_us: Sequence[float], copy_bytes_per_us: float
) -> tuple[Costs, float]:
    """The constants that fit launches best, by relative error; and the mean of that error.

    No constant is negative: one that would be is left out, and the others are fitted anew.
    """
    times = np.array(times_us)
    table: npt.NDArray[np.float64] = np.array([_terms(work) for work in works]) / times[:, None]
    kept = list(range(table.shape[1]))
    found = np.zeros(table.shape[1])
    while kept:
        values = np.linalg.lstsq(table[:, kept], np.ones(len(times)), rcond=None)[0]
        if values.min() >= 0:
            found[kept] = values
            break
        del kept[int(values.argmin())]
    error = float(np.abs(table @ found - 1).mean())
    return _costs([float(value) for value in found], copy_bytes_per_us), error


def _costs(constants: Sequence[float], copy_bytes_per_us: float) -> Costs:
    """The constants in the order of `_terms`."""
    launch, prompt_token, prompt_pair, sample, row, row_context = constants
    return Costs(launch, prompt_token, prompt_pair, sample, row, row_context, copy_bytes_per_us)


def _terms(work: Work) -> tuple[float, ...]:
    """How often each constant counts in a launch, in their order."""
    return (
        1.0,
        float(work.prompt_tokens),
        work.prompt_pairs,
        float(work.sampled_rows > 0),
        float(work.sampled_rows),
        work.row_context,
    )
