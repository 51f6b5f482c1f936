"""Reads the header of a GGUF file.

The `gguf` package's own reader makes several objects of every array element, which takes
tens of times longer on a large vocabulary. Nothing here trusts the file: each count, length
and offset is checked against a bound or against the bytes that are there, and what does not
fit raises `CheckpointError`.
"""

import math
import mmap
import struct
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.gguf_header import FieldValue, GgufHeader, GgufTensor

FIELD_COUNT_MAX = 65_536
TENSOR_COUNT_MAX = 1_048_576
ARRAY_LENGTH_MAX = 16_777_216
ARRAY_DEPTH_MAX = 4
STRING_BYTES_MAX = 64 * 1024 * 1024
DIMENSION_COUNT_MAX = 4
TENSOR_ELEMENTS_MAX = 2**48
ALIGNMENT_BYTES_DEFAULT = 32
ALIGNMENT_BYTES_MAX = 1024 * 1024

VERSION = 3

_SCALAR_FORMATS = {
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
_TYPE_STRING = 8
_TYPE_ARRAY = 9


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of the GGUF file at `path`; every tensor in it lies wholly within the file.

    Raises `CheckpointError` if the file cannot be read or is not a sound GGUF version 3 file.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise CheckpointError(f"{path}: the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


class _Reader:
    """Walks over the file once, from its start."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def header(self) -> GgufHeader:
        if self._bytes(4, "the magic number") != b"GGUF":
            raise self._error("is not a GGUF file: it does not begin with the letters GGUF")
        version = self._integer("I", "the version")
        if version != VERSION:
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") == VERSION
            found = "is big-endian" if big_endian else f"has GGUF version {version}"
            raise self._error(f"{found}: only little-endian version {VERSION} is supported")
        tensor_count = self._count("Q", "the tensor count", TENSOR_COUNT_MAX)
        field_count = self._count("Q", "the field count", FIELD_COUNT_MAX)
        fields: dict[str, FieldValue] = {}
        for _ in range(field_count):
            key = self._string("a field's name")
            if key in fields:
                raise self._error(f"has the field {key} twice")
            type_number = self._integer("I", f"the type of field {key}")
            fields[key] = self._value(type_number, f"field {key}", depth=0)
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        return GgufHeader(
            path=self.path,
            fields=fields,
            tensors=self._placed(entries, self._alignment(fields)),
            header_bytes=self.position,
            file_bytes=len(self.data),
        )

    def _alignment(self, fields: dict[str, FieldValue]) -> int:
        value = fields.get("general.alignment", ALIGNMENT_BYTES_DEFAULT)
        if isinstance(value, int) and 1 <= value <= ALIGNMENT_BYTES_MAX and value % 8 == 0:
            return value
        raise self._error(
            f"field general.alignment is {value!r}: must be a multiple of 8 up to "
            f"{ALIGNMENT_BYTES_MAX}"
        )

    def _tensor_entry(self) -> GgufTensor:
        """A tensor's line in the index. Its offset counts from the first tensor's place."""
        name = self._string("a tensor's name")
        what = f"tensor {name}"
        dimension_count = self._count("I", f"the dimensions of {what}", DIMENSION_COUNT_MAX)
        sizes = [self._integer("Q", f"the sizes of {what}") for _ in range(dimension_count)]
        shape = tuple(reversed(sizes))
        kind_number = self._integer("I", f"the kind of {what}")
        offset = self._integer("Q", f"the offset of {what}")
        try:
            kind = GGMLQuantizationType(kind_number)
        except ValueError:
            raise self._error(f"{what} has the unknown kind {kind_number}") from None
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        elements = math.prod(shape)
        if not shape or not 1 <= elements <= TENSOR_ELEMENTS_MAX:
            raise self._error(f"{what} has the shape {list(shape)}, which cannot be right")
        if shape[-1] % block_elements:
            raise self._error(
                f"{what} has rows of {shape[-1]}: {kind.name} needs a multiple of "
                f"{block_elements}"
            )
        return GgufTensor(name, shape, kind, offset, elements // block_elements * block_bytes)

    def _placed(self, entries: list[GgufTensor], alignment: int) -> dict[str, GgufTensor]:
        """The tensors by name, with offsets from the start of the file."""
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for entry in entries:
            if entry.name in tensors:
                raise self._error(f"has the tensor {entry.name} twice")
            if entry.offset % alignment:
                raise self._error(f"tensor {entry.name} is not aligned to {alignment} bytes")
            offset = start + entry.offset
            missing = offset + entry.byte_count - len(self.data)
            if missing > 0:
                raise self._error(
                    f"is truncated: tensor {entry.name} ends {missing} bytes after the end of "
                    "the file"
                )
            tensors[entry.name] = GgufTensor(
                entry.name, entry.shape, entry.kind, offset, entry.byte_count
            )
        return tensors

    def _value(self, type_number: int, what: str, depth: int) -> FieldValue:
        if type_number == _TYPE_STRING:
            return self._string(what)
        if type_number == _TYPE_ARRAY:
            return self._array(what, depth)
        return self._scalars(type_number, 1, what)[0]

    def _array(self, what: str, depth: int) -> tuple[FieldValue, ...]:
        if depth == ARRAY_DEPTH_MAX:
            raise self._error(f"{what} nests lists more than {ARRAY_DEPTH_MAX} deep")
        type_number = self._integer("I", what)
        length = self._count("Q", f"the length of {what}", ARRAY_LENGTH_MAX)
        if type_number == _TYPE_STRING:
            return self._strings(length, what)
        if type_number == _TYPE_ARRAY:
            return tuple(self._array(what, depth + 1) for _ in range(length))
        return self._scalars(type_number, length, what)

    def _scalars(self, type_number: int, count: int, what: str) -> tuple[FieldValue, ...]:
        letter = _SCALAR_FORMATS.get(type_number)
        if letter is None:
            raise self._error(f"{what} has the unknown type {type_number}")
        layout = struct.Struct(f"<{count}{letter}")
        return layout.unpack(self._bytes(layout.size, what))

    def _strings(self, count: int, what: str) -> tuple[str, ...]:
        # A vocabulary has hundreds of thousands of strings: this loop stays flat for speed.
        data, position, end = self.data, self.position, len(self.data)
        read_length = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + read_length(data, position)[0]
                if position > end:
                    raise self._truncated(what)
                texts.append(data[start:position].decode())
        except struct.error:
            raise self._truncated(what) from None
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8: {error}") from None
        self.position = position
        return tuple(texts)

    def _string(self, what: str) -> str:
        length = self._count("Q", f"the length of {what}", STRING_BYTES_MAX)
        try:
            return self._bytes(length, what).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8: {error}") from None

    def _count(self, letter: str, what: str, count_max: int) -> int:
        count = self._integer(letter, what)
        if count > count_max:
            raise self._error(f"{what} is {count}: more than {count_max} is not accepted")
        return count

    def _integer(self, letter: str, what: str) -> int:
        layout = struct.Struct(f"<{letter}")
        value: int = layout.unpack(self._bytes(layout.size, what))[0]
        return value

    def _bytes(self, count: int, what: str) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise self._truncated(what)
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def _truncated(self, what: str) -> CheckpointError:
        return self._error(f"is truncated: it ends within {what}")

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {text}")
