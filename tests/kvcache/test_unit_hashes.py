"""Prompts have hashes in common as far as they begin alike, under the same salt."""

from hypothesis import given
from hypothesis import strategies as st

from tidegate.kvcache.layout import Tokens
from tidegate.kvcache.unit_hashes import unit_hashes

IDS = st.lists(st.integers(0, 2), max_size=24)


def packed(ids: list[int]) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in ids)


@given(IDS, IDS, st.integers(1, 5))
def test_hashes_agree_exactly_as_far_as_units_do(a: list[int], b: list[int], unit: int) -> None:
    hashes = [unit_hashes(packed(ids), Tokens(unit), b"salt") for ids in (a, b)]
    assert [len(each) for each in hashes] == [len(a) // unit, len(b) // unit]
    for index, (one, other) in enumerate(zip(*hashes, strict=False)):
        end = (index + 1) * unit
        assert (one == other) == (a[:end] == b[:end])


@given(IDS, st.binary(max_size=100), st.binary(max_size=100))
def test_nothing_is_shared_under_different_salts(ids: list[int], a: bytes, b: bytes) -> None:
    one, other = (unit_hashes(packed(ids), Tokens(2), salt) for salt in (a, b))
    assert a == b or not set(one) & set(other)


def test_a_part_of_a_unit_at_the_end_has_no_hash() -> None:
    tokens = packed([7, 8, 9, 10, 11])
    assert unit_hashes(tokens, Tokens(4), b"") == unit_hashes(tokens[:16], Tokens(4), b"")
    assert unit_hashes(tokens, Tokens(6), b"") == ()
    assert len(unit_hashes(tokens, Tokens(4), b"")[0]) == 16
