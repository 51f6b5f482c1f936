"""Rotary position embeddings as a configuration describes them. Loads no torch."""

import msgspec

from tidegate.engine.checkpoint.config import require, require_count, require_positive


class LinearScaling(msgspec.Struct, frozen=True, tag="linear"):
    """All frequencies are divided by `factor`: positions lie closer together."""

    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True, tag="llama3"):
    """Llama 3.1: frequencies that turn less than `low_turns` times in `original_context`
    positions are divided by `factor`, those that turn more than `high_turns` times are kept,
    and between them the division fades.
    """

    factor: float
    low_turns: float
    high_turns: float
    original_context: int


class YarnScaling(msgspec.Struct, frozen=True, kw_only=True, tag="yarn"):
    """YaRN (arXiv 2309.00071): frequencies that turn more than `fast_turns` times in
    `original_context` positions are kept, those that turn less than `slow_turns` times are
    divided by `factor`, and between them the division fades along the pairs of a head.

    `truncate` rounds the two ends of that range outwards to whole pairs. Rotated queries and
    keys are multiplied with `attention_factor`, so scores with its square.
    """

    factor: float
    original_context: int
    fast_turns: float
    slow_turns: float
    attention_factor: float
    truncate: bool


class FactorScaling(msgspec.Struct, frozen=True, tag="factors"):
    """Each pair's frequency is divided by its own factor, as GGUF files have them."""

    factors: tuple[float, ...]


Scaling = FactorScaling | LinearScaling | Llama3Scaling | YarnScaling


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """How queries and keys turn with their position.

    The first `size` numbers of a head are rotated: number i with number i + size / 2, by
    position * theta ** (-2 i / size). With `turning_pairs` only that many pairs turn, and the
    others have the frequency 0. Raises `CheckpointError`, which names the field.
    """

    theta: float
    size: int
    turning_pairs: int | None = None
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        require_positive("rope theta", self.theta)
        require_count("rope size", self.size)
        require(self.size % 2 == 0, "rope size", self.size, "must be even")
        if self.turning_pairs is not None:
            require_count("rope turning_pairs", self.turning_pairs, self.size // 2)
        match self.scaling:
            case FactorScaling(factors=factors):
                right = f"must have one for each of the {self.size // 2} pairs"
                count = f"{len(factors)} entries"
                require(len(factors) == self.size // 2, "rope factors", count, right)
                for factor in factors:
                    require_positive("rope factors", factor)
            case LinearScaling(factor=factor):
                require_positive("rope factor", factor)
            case Llama3Scaling() as llama3:
                require_positive("rope factor", llama3.factor)
                require_positive("rope low_freq_factor", llama3.low_turns)
                require(
                    llama3.high_turns > llama3.low_turns,
                    "rope high_freq_factor",
                    llama3.high_turns,
                    f"must be above low_freq_factor, which is {llama3.low_turns}",
                )
                require_count("rope original_max_position_embeddings", llama3.original_context)
            case YarnScaling() as yarn:
                require_positive("rope factor", yarn.factor)
                require_positive("rope attention_factor", yarn.attention_factor)
                require_positive("rope beta_slow", yarn.slow_turns)
                require(
                    yarn.fast_turns > yarn.slow_turns,
                    "rope beta_fast",
                    yarn.fast_turns,
                    f"must be above beta_slow, which is {yarn.slow_turns}",
                )
                require_count("rope original_max_position_embeddings", yarn.original_context)
                require(self.theta > 1, "rope theta", self.theta, "must be above 1")
            case None:
                pass
