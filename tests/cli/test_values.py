"""What option values may be, and what is said of those that may not."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from tidegate.cli import values


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1048576),
        ("512MB", 512_000_000),
        ("2GiB", 2 * 1024**3),
        ("2gib", 2 * 1024**3),
        ("1.5 KiB", 1536),
        ("300B", 300),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert values.byte_size(text) == size


@pytest.mark.parametrize(
    "text", ["0", "0GiB", "-1GiB", "2G", "GiB", "", "1e9", "9" * 400, "1 2"]
)
def test_a_bad_size_is_answered_with_good_ones(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"such as 2GiB, 512MB or 1048576"):
        values.byte_size(text)


@pytest.mark.parametrize("text", ["0", "-5", "1.5", "", "many", "99999999999"])
def test_counts_are_whole_and_positive(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="whole number from 1"):
        values.count(text)


@pytest.mark.parametrize("text", ["0", "4097", "-16", "x"])
def test_a_page_has_its_bounds(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="from 1 to 4096"):
        values.page_tokens(text)
    assert values.page_tokens("4096") == 4096


def test_a_chunk_budget_may_be_none_and_not_zero() -> None:
    assert values.count_or_none("none") is None
    assert values.count_or_none("64") == 64
    with pytest.raises(ArgumentTypeError, match="'none' for no bound"):
        values.count_or_none("0")


@pytest.mark.parametrize("text", ["-1", "65536", "http", ""])
def test_ports_have_their_range(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="from 0 to 65535"):
        values.port(text)


@pytest.mark.parametrize(
    "text", ["", "a", "a=", "=2", "a=0", "a=-1", "a=nan", "a=inf", "a=2e6", f"{'x' * 257}=1"]
)
def test_a_weight_comes_with_a_tenants_name(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="must be NAME=W, such as research=2"):
        values.tenant_weight(text)
    assert values.tenant_weight("team=a=2.5") == ("team=a", 2.5)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e9", "soon"])
def test_times_are_positive_and_finite(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="seconds, larger than 0"):
        values.seconds(text)
    assert values.seconds("0.5") == 0.5


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (values.device, "cuda:1", ["gpu", "cuda:", "cuda:x", "CPU", "cpu:0"]),
        (values.dtype, "float32", ["float16", "fp32", ""]),
        (values.process_name, "decode-0", ["", "-x", "a b", "x" * 65, "a/b"]),
    ],
)
def test_names_are_checked(parse: Callable[[str], str], good: str, bad: list[str]) -> None:
    assert parse(good) == good
    for text in bad:
        with pytest.raises(ArgumentTypeError, match=r"must be"):
            parse(text)


def test_true_and_false_are_words() -> None:
    assert values.true_or_false("true") is True
    assert values.true_or_false("False") is False
    with pytest.raises(ArgumentTypeError, match="true or false"):
        values.true_or_false("1")


def test_a_file_must_be_readable_text(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    assert values.readable_file(str(template)) == template
    with pytest.raises(ArgumentTypeError, match="No such file"):
        values.readable_file(str(tmp_path / "none"))
    with pytest.raises(ArgumentTypeError, match="Is a directory"):
        values.readable_file(str(tmp_path))
    template.write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentTypeError, match="UTF-8"):
        values.readable_file(str(template))


def test_sizes_of_requests_are_pairs() -> None:
    assert values.lengths("1000+200, 8000+500") == ((1000, 200), (8000, 500))
    for text in ("", "1000", "1000+", "0+5", "5+0", "1+2,", "1+2;3+4", "9999999999+1", "-1+2"):
        with pytest.raises(ArgumentTypeError, match=r"such as 1000\+200"):
            values.lengths(text)
    values.lengths(",".join(["1+1"] * values.LENGTHS_COUNT_MAX))
    with pytest.raises(ArgumentTypeError, match="16 of them at most; got 17"):
        values.lengths(",".join(["1+1"] * (values.LENGTHS_COUNT_MAX + 1)))
