"""The fields of a GGUF file that belong to its architecture, checked."""

import numpy as np

from tidegate.engine.checkpoint.config import COUNT_MAX
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.gguf_header import GgufHeader


class ArchitectureFields:
    """The fields whose names begin with the architecture.

    The accessors raise `CheckpointError` as those of `GgufHeader` do.
    """

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header = header
        self.architecture = architecture

    def count(self, key: str, default: int | None = None, *, count_max: int = COUNT_MAX) -> int:
        """An integer from 1 to `count_max`."""
        value = self.header.integer(self.name(key), default)
        if not 1 <= value <= count_max:
            raise self.error(key, value, f"must be from 1 to {count_max}")
        return value

    def counts(self, key: str, layer_count: int) -> list[int]:
        """An integer of at least 1 for each layer. The file has a list, or one for all."""
        if not self.is_list(key):
            return [self.count(key)] * layer_count
        values = self.header.integers(self.name(key))
        if len(values) != layer_count or not all(1 <= value <= COUNT_MAX for value in values):
            raise self.error(
                key, values, f"must have {layer_count} entries, from 1 to {COUNT_MAX}"
            )
        return values

    def number(self, key: str, default: float | None = None) -> float:
        """A number with the fewest digits that give the same 32 bits.

        So 1e-5, which the file can only hold in 32 bits, is again the 1e-5 that was meant.
        """
        return float(str(np.float32(self.header.number(self.name(key), default))))

    def text(self, key: str, default: str) -> str:
        return self.header.text(self.name(key), default)

    def booleans(self, key: str) -> list[bool]:
        return self.header.booleans(self.name(key))

    def is_list(self, key: str) -> bool:
        return isinstance(self.header.fields.get(self.name(key)), tuple)

    def error(self, key: str, value: object, right: str) -> CheckpointError:
        return CheckpointError(
            f"{self.header.path}: field {self.name(key)} is {value}: {right}"
        )

    def name(self, key: str) -> str:
        """The whole name of a field."""
        return f"{self.architecture}.{key}"
