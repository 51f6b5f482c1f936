"""Reads the header of a GGUF file: its fields and where its tensors lie.

The `gguf` package's own reader makes a Python object of every array element and takes
tens of times longer on a large vocabulary. Nothing here trusts the file: each count, length
and offset is checked against a bound or against the bytes that are there, and what does not
fit raises `CheckpointError`.
"""

import math
import mmap
import struct
from pathlib import Path

import msgspec
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tidegate.engine.checkpoint.errors import CheckpointError

FIELD_COUNT_MAX = 65_536
TENSOR_COUNT_MAX = 1_048_576
ARRAY_LENGTH_MAX = 16_777_216
STRING_BYTES_MAX = 64 * 1024 * 1024
DIMENSION_COUNT_MAX = 4
ALIGNMENT_BYTES_MAX = 1024 * 1024
ARRAY_DEPTH_MAX = 4

type_of_scalar = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
TYPE_STRING = 8
TYPE_ARRAY = 9

Scalar = int | float | bool | str
FieldValue = Scalar | tuple["FieldValue", ...]


class GgufTensor(msgspec.Struct, frozen=True):
    """Where a tensor's bytes are in the file and how they are to be read."""

    name: str
    shape: tuple[int, ...]  # Rows first, as torch and numpy count.
    kind: GGMLQuantizationType
    offset: int  # From the start of the file.
    byte_count: int


class GgufHeader(msgspec.Struct, frozen=True):
    """Everything in a GGUF file ahead of the weights.

    `text`, `integer` and the other accessors return a field of that type. A field that is missing
    gives `default`, or `CheckpointError` if that is None; one of another type gives
    `CheckpointError`.
    """

    path: Path
    fields: dict[str, FieldValue]
    tensors: dict[str, GgufTensor]
    data_offset: int  # From the start of the file: all before it is header.
    file_bytes: int

    def has(self, key: str) -> bool:
        return key in self.fields

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, value, "a number")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        values = [value for value in self._array(key) if isinstance(value, str)]
        return self._all(key, values, "a list of strings")

    def integers(self, key: str) -> list[int]:
        values = [
            value
            for value in self._array(key)
            if isinstance(value, int) and not isinstance(value, bool)
        ]
        return self._all(key, values, "a list of integers")

    def numbers(self, key: str) -> list[float]:
        values = [float(value) for value in self._array(key) if isinstance(value, float | int)]
        return self._all(key, values, "a list of numbers")

    def _value(self, key: str, default: FieldValue | None) -> FieldValue:
        value = self.fields.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: field {key} is missing")
        return value

    def _array(self, key: str) -> tuple[FieldValue, ...]:
        value = self._value(key, None)
        if not isinstance(value, tuple):
            raise self._wrong(key, value, "a list")
        return value

    def _all[T](self, key: str, values: list[T], right: str) -> list[T]:
        if len(values) != len(self._array(key)):
            raise self._wrong(key, self._array(key), right)
        return values

    def _wrong(self, key: str, value: FieldValue, right: str) -> CheckpointError:
        shown = "a list" if isinstance(value, tuple) else repr(value)
        return CheckpointError(f"{self.path}: field {key} is {shown}: must be {right}")


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of the GGUF file at `path`; every tensor in it lies wholly within the file.

    Raises `CheckpointError` if the file cannot be read or is not a sound GGUF version 3 file.
    """
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            if file_bytes == 0:
                raise CheckpointError(f"{path}: the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(path, data).read()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
