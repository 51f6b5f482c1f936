"""The header of a GGUF file: typed access to its fields, and where its tensors lie."""

from pathlib import Path

import msgspec
from gguf.constants import GGMLQuantizationType

from tidegate.engine.checkpoint.errors import CheckpointError

Scalar = int | float | bool | str
FieldValue = Scalar | tuple["FieldValue", ...]


class GgufTensor(msgspec.Struct, frozen=True):
    """Where a tensor's bytes are in the file, and how they are to be read."""

    name: str
    shape: tuple[int, ...]  # Rows first, as torch and numpy count.
    kind: GGMLQuantizationType
    offset: int  # From the start of the file.
    byte_count: int


class GgufHeader(msgspec.Struct, frozen=True):
    """Everything in a GGUF file ahead of the weights.

    `text`, `integer` and the other accessors return a field as that type. For a missing field
    they return `default`, or raise `CheckpointError` if that is None. A field of another type
    is a `CheckpointError` too. Both name the file and the field.
    """

    path: Path
    fields: dict[str, FieldValue]
    tensors: dict[str, GgufTensor]
    header_bytes: int  # All before the padding that precedes the first tensor.
    file_bytes: int

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if isinstance(value, str):
            return value
        raise self._wrong_type(key, value, "a string")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self._wrong_type(key, value, "an integer")

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise self._wrong_type(key, value, "a number")

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if isinstance(value, bool):
            return value
        raise self._wrong_type(key, value, "true or false")

    def texts(self, key: str) -> list[str]:
        values = self._array(key)
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) == len(values):
            return texts
        raise self._wrong_type(key, values, "a list of strings")

    def integers(self, key: str) -> list[int]:
        values = self._array(key)
        integers = [
            value for value in values if isinstance(value, int) and not isinstance(value, bool)
        ]
        if len(integers) == len(values):
            return integers
        raise self._wrong_type(key, values, "a list of integers")

    def numbers(self, key: str) -> list[float]:
        values = self._array(key)
        numbers = [value for value in values if isinstance(value, float)]
        if len(numbers) == len(values):
            return numbers
        raise self._wrong_type(key, values, "a list of numbers")

    def booleans(self, key: str) -> list[bool]:
        values = self._array(key)
        booleans = [value for value in values if isinstance(value, bool)]
        if len(booleans) == len(values):
            return booleans
        raise self._wrong_type(key, values, "a list of true and false")

    def _value(self, key: str, default: FieldValue | None) -> FieldValue:
        value = self.fields.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: field {key} is missing")
        return value

    def _array(self, key: str) -> tuple[FieldValue, ...]:
        value = self._value(key, None)
        if isinstance(value, tuple):
            return value
        raise self._wrong_type(key, value, "a list")

    def _wrong_type(self, key: str, value: FieldValue, right: str) -> CheckpointError:
        shown = f"a list of {len(value)}" if isinstance(value, tuple) else repr(value)
        return CheckpointError(f"{self.path}: field {key} is {shown}: must be {right}")
