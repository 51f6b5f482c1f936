"""Typed access to a GGUF header's fields."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.gguf_header import FieldValue, GgufHeader

FIELDS: dict[str, FieldValue] = {
    "text": "tide",
    "integer": 3,
    "number": 0.5,
    "flag": True,
    "texts": ("a", "b"),
    "integers": (1, 2),
    "numbers": (0.5, 1.0),
    "flags": (True, False),
    "empty": (),
}
HEADER = GgufHeader(Path("model.gguf"), FIELDS, {}, header_bytes=0, file_bytes=0)

Accessor = Callable[[GgufHeader, str], object]
ACCESSORS: dict[str, tuple[Accessor, set[str]]] = {
    "text": (GgufHeader.text, {"text"}),
    "integer": (GgufHeader.integer, {"integer"}),
    "number": (GgufHeader.number, {"integer", "number"}),
    "boolean": (GgufHeader.boolean, {"flag"}),
    "texts": (GgufHeader.texts, {"texts", "empty"}),
    "integers": (GgufHeader.integers, {"integers", "empty"}),
    "numbers": (GgufHeader.numbers, {"numbers", "empty"}),
    "booleans": (GgufHeader.booleans, {"flags", "empty"}),
}


@pytest.mark.parametrize("name", ACCESSORS)
def test_an_accessor_returns_its_own_type_and_refuses_all_others(name: str) -> None:
    accessor, accepted = ACCESSORS[name]
    for key, value in FIELDS.items():
        if key in accepted:
            expected = list(value) if isinstance(value, tuple) else value
            assert accessor(HEADER, key) == expected
        else:
            with pytest.raises(
                CheckpointError, match=rf"model\.gguf: field {key} is .*must be"
            ):
                accessor(HEADER, key)


@pytest.mark.parametrize("name", ACCESSORS)
def test_a_missing_field_is_named(name: str) -> None:
    accessor, _ = ACCESSORS[name]
    with pytest.raises(CheckpointError, match=r"model\.gguf: field absent is missing"):
        accessor(HEADER, "absent")


def test_a_default_stands_in_for_a_missing_field_only() -> None:
    assert HEADER.text("absent", "x") == "x"
    assert HEADER.integer("absent", 0) == 0
    assert HEADER.number("absent", 0.25) == 0.25
    assert HEADER.boolean("absent", False) is False
    assert HEADER.integer("integer", 7) == 3
    with pytest.raises(CheckpointError, match="field text is 'tide': must be an integer"):
        HEADER.integer("text", 7)
