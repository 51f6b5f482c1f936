"""The GGUF header reader: sound files are read, all others refused with their fault named."""

import contextlib
import struct
from pathlib import Path

import gguf
import pytest
from gguf.constants import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oracle.make_tiny_checkpoint import make_tiny_checkpoint
from oracle.make_tiny_gguf import make_tiny_gguf
from tidegate.engine.checkpoint import gguf_reader
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.gguf_header import GgufHeader
from tidegate.engine.checkpoint.gguf_reader import read_gguf_header

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
F32, Q8_0 = 0, 8


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def field(key: str, type_number: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", type_number) + value


def array(type_number: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", type_number, count) + values


def tensor(name: str, sizes: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    layout = f"<I{len(sizes)}QIQ"
    return text(name) + struct.pack(layout, len(sizes), *sizes, kind, offset)


def file_bytes(
    fields: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    field_count: int | None = None,
    tensor_count: int | None = None,
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(fields) if field_count is None else field_count,
    )
    header = head + b"".join(fields) + b"".join(tensors)
    return header + b"\0" * (-len(header) % 32 if data else 0) + data


SMALL = file_bytes(
    (
        field("general.architecture", STRING, text("llama")),
        field("a.number", FLOAT32, struct.pack("<f", 0.5)),
        field("a.flag", BOOL, b"\1"),
        field("a.list", ARRAY, array(INT32, 3, struct.pack("<3i", -1, 0, 1))),
        field("words", ARRAY, array(STRING, 2, text("tide") + text("gæte"))),
        field(
            "nested",
            ARRAY,
            array(ARRAY, 2, array(BOOL, 1, b"\0") + array(BOOL, 2, b"\1\0")),
        ),
    ),
    (tensor("first", (4, 3)), tensor("second", (32,), Q8_0, 64)),
    data=bytes(64 + 34),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def read(path: Path, content: bytes) -> GgufHeader:
    path.write_bytes(content)
    return read_gguf_header(path)


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_gguf_header(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message


def test_a_small_file_is_read_to_the_last_field_and_tensor(path: Path) -> None:
    header = read(path, SMALL)
    assert header.fields == {
        "general.architecture": "llama",
        "a.number": 0.5,
        "a.flag": True,
        "a.list": (-1, 0, 1),
        "words": ("tide", "gæte"),
        "nested": ((False,), (True, False)),
    }
    first, second = header.tensors["first"], header.tensors["second"]
    assert (first.shape, first.kind, first.byte_count) == ((3, 4), GGMLQuantizationType.F32, 48)
    assert (second.shape, second.kind, second.byte_count) == (
        (32,),
        GGMLQuantizationType.Q8_0,
        34,
    )
    assert first.offset == len(SMALL) - 98
    assert second.offset == len(SMALL) - 34
    assert header.file_bytes == len(SMALL)


def test_the_alignment_that_the_file_names_places_the_tensors(path: Path) -> None:
    alignment = field("general.alignment", UINT32, struct.pack("<I", 256))
    header = file_bytes((alignment,), (tensor("t", (2,)),))
    content = header + bytes(256 - len(header)) + bytes(8)
    assert read(path, content).tensors["t"].offset == 256


def test_the_package_s_own_reader_finds_the_same(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "gemma3")
    path = make_tiny_gguf(tmp_path / "tiny.gguf", folder, kind=GGMLQuantizationType.Q8_0)
    header = read_gguf_header(path)
    other = gguf.GGUFReader(path)
    own_fields = {name for name in other.fields if not name.startswith("GGUF.")}
    assert header.fields.keys() == own_fields
    for name, value in header.fields.items():
        expected = other.fields[name].contents()
        assert (list(value) if isinstance(value, tuple) else value) == expected, name
    assert list(header.tensors) == [entry.name for entry in other.tensors]
    for entry in other.tensors:
        mine = header.tensors[entry.name]
        assert mine.shape == tuple(reversed(entry.shape.tolist()))
        assert mine.kind == entry.tensor_type
        assert (mine.offset, mine.byte_count) == (entry.data_offset, entry.n_bytes)


def test_a_file_cut_short_anywhere_is_refused(path: Path) -> None:
    words = field("words", ARRAY, array(STRING, 2, text("tide") + text("gate")))
    for whole in (SMALL, file_bytes((words,))):
        assert read(path, whole).file_bytes == len(whole)
        for length in range(1, len(whole)):
            message = refusal(path, whole[:length])
            assert "truncated" in message, (length, message)


def test_a_missing_file_a_folder_and_an_empty_file_are_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.gguf: cannot be read: No such file"):
        read_gguf_header(path)
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_gguf_header(path.parent)
    assert "empty" in refusal(path, b"")


def test_other_formats_and_versions_are_refused_by_name(path: Path) -> None:
    assert "not a GGUF file" in refusal(path, file_bytes(magic=b"PK\3\4"))
    assert "GGUF version 2" in refusal(path, file_bytes(version=2))
    assert "big-endian" in refusal(path, file_bytes(version=0x03000000))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (file_bytes(field_count=2**40), "field count"),
        (file_bytes(tensor_count=2**40), "tensor count"),
        (file_bytes((struct.pack("<Q", 2**60),)), "field's name"),
        (file_bytes((field("k", STRING, struct.pack("<Q", 2**60)),)), "field k"),
        (file_bytes((field("k", ARRAY, array(INT32, 2**40, b"")),)), "field k"),
        (file_bytes((), (text("t") + struct.pack("<I", 99),)), "dimensions of tensor t"),
        (file_bytes((), (tensor("t", (2**40, 2**40)),)), "tensor t"),
        (file_bytes((), (tensor("t", (0, 4)),)), "tensor t"),
        (file_bytes((), (tensor("t", ()),)), "tensor t"),
    ],
)
def test_absurd_counts_are_refused_without_allocating(
    path: Path, content: bytes, named: str
) -> None:
    assert named in refusal(path, content)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (file_bytes((field("k", BOOL, b"\1"), field("k", BOOL, b"\1"))), "field k twice"),
        (file_bytes((field("k", 77, b""),)), "field k has the unknown type 77"),
        (
            file_bytes((field("k", ARRAY, array(77, 1, b"")),)),
            "field k has the unknown type 77",
        ),
        (file_bytes((field("k", STRING, text(b"\xff\xfe")),)), "field k is not UTF-8"),
        (file_bytes((field("k", ARRAY, array(STRING, 1, text(b"\xff"))),)), "is not UTF-8"),
        (
            file_bytes((field("general.alignment", UINT32, struct.pack("<I", 0)),)),
            "general.alignment is 0",
        ),
        (file_bytes((), (tensor("t", (2,), 999),), bytes(64)), "t has the unknown kind 999"),
        (file_bytes((), (tensor("t", (31,), Q8_0),), bytes(64)), "needs a multiple of 32"),
        (file_bytes((), (tensor("t", (2,), F32, 5),), bytes(64)), "not aligned to 32"),
        (file_bytes((), (tensor("t", (2,)), tensor("t", (2,))), bytes(64)), "tensor t twice"),
        (file_bytes((), (tensor("t", (16,)),), bytes(63)), "tensor t ends 1 bytes after"),
    ],
)
def test_unsound_content_is_refused_by_name(path: Path, content: bytes, fault: str) -> None:
    assert fault in refusal(path, content)


def test_lists_may_nest_but_not_without_end(path: Path) -> None:
    value = array(BOOL, 1, b"\1")
    for _ in range(gguf_reader.ARRAY_DEPTH_MAX - 1):
        value = array(ARRAY, 1, value)
    assert read(path, file_bytes((field("k", ARRAY, value),))).fields["k"] == ((((True,),),),)
    deeper = array(ARRAY, 1, value)
    assert "nests lists" in refusal(path, file_bytes((field("k", ARRAY, deeper),)))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=4
    )
)
def test_spoilt_bytes_give_a_header_or_a_refusal_and_nothing_else(
    path: Path, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(SMALL)
    for position, byte in changes:
        content[position] = byte
    path.write_bytes(content)
    header = None
    with contextlib.suppress(CheckpointError):
        header = read_gguf_header(path)
    for entry in header.tensors.values() if header else ():
        assert 0 < entry.offset <= entry.offset + entry.byte_count <= len(SMALL)
