"""Parsers of option values. Each raises `ArgumentTypeError`, which says what would be right.

argparse puts the option's name in front: `argument --port: must be …`.
"""

import math
import re
from argparse import ArgumentTypeError
from pathlib import Path

from tidegate.kvcache.layout import DTYPE_BYTES, PAGE_TOKENS_MAX

COUNT_MAX = 2**31 - 1
THREAD_COUNT_MAX = 1024
ROW_COUNT_MAX = 65_536
BYTES_MAX = 2**50
SECONDS_MAX = 7 * 24 * 3600.0
LENGTHS_COUNT_MAX = 16
TENANT_LENGTH_MAX = 256
TENANT_WEIGHT_MIN = 0.001
TENANT_WEIGHT_MAX = 1_000_000.0
DTYPES = tuple(name for name in DTYPE_BYTES if name != "float16")

_BYTE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_UNITS_BY_LOWER_CASE = {name.lower(): size for name, size in _BYTE_UNITS.items()}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")
_LENGTHS = re.compile(r"(\d{1,10})\+(\d{1,10})")
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def count(text: str) -> int:
    """A whole number from 1 to `COUNT_MAX`."""
    return _whole(text, 1, COUNT_MAX)


def count_or_zero(text: str) -> int:
    """A whole number from 0 to `COUNT_MAX`."""
    return _whole(text, 0, COUNT_MAX)


def thread_count(text: str) -> int:
    return _whole(text, 1, THREAD_COUNT_MAX)


def row_count(text: str) -> int:
    """How many requests a worker runs at once."""
    return _whole(text, 1, ROW_COUNT_MAX)


def page_tokens(text: str) -> int:
    """A page's size in tokens, 1 to `PAGE_TOKENS_MAX`."""
    return _whole(text, 1, PAGE_TOKENS_MAX)


def count_or_none(text: str) -> int | None:
    """A whole number from 1, or the word `none`, which means no bound."""
    if text.lower() == "none":
        return None
    try:
        return _whole(text, 1, COUNT_MAX)
    except ArgumentTypeError:
        raise ArgumentTypeError(
            f"must be a whole number from 1, or 'none' for no bound; got {text!r}"
        ) from None


def port(text: str) -> int:
    """A TCP port; 0 lets the system choose a free one."""
    return _whole(text, 0, 65535)


def descriptor(text: str) -> int:
    """The number of an open file that the parent process hands down."""
    return _whole(text, 0, COUNT_MAX)


def byte_size(text: str) -> int:
    """A size in bytes, such as 2GiB, 512MB or 1048576."""
    right = "must be a size such as 2GiB, 512MB or 1048576 (bytes)"
    match = _SIZE.fullmatch(text.strip())
    unit = None if match is None else _UNITS_BY_LOWER_CASE.get(match[2].lower())
    if match is None or unit is None:
        raise ArgumentTypeError(f"{right}, got {text!r}")
    size = float(match[1]) * unit
    if not 1 <= size <= BYTES_MAX:
        raise ArgumentTypeError(f"{right}, from 1 byte to 1024 TiB; got {text!r}")
    return int(size)


def lengths(text: str) -> tuple[tuple[int, int], ...]:
    """Sizes of requests, such as 1000+200,8000+500: tokens of the prompt + new tokens."""
    right = (
        "must be prompt+new tokens, such as 1000+200,8000+500, each from 1, "
        f"and {LENGTHS_COUNT_MAX} of them at most"
    )
    pairs: list[tuple[int, int]] = []
    for part in text.split(","):
        match = _LENGTHS.fullmatch(part.strip())
        if match is None or not all(1 <= int(number) <= COUNT_MAX for number in match.groups()):
            raise ArgumentTypeError(f"{right}; got {text!r}")
        pairs.append((int(match[1]), int(match[2])))
    if len(pairs) > LENGTHS_COUNT_MAX:
        raise ArgumentTypeError(f"{right}; got {len(pairs)}")
    return tuple(pairs)


def seconds(text: str) -> float:
    """A time in seconds, larger than zero and at most a week."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= SECONDS_MAX:
        raise ArgumentTypeError(
            f"must be seconds, larger than 0 and at most {SECONDS_MAX:.0f}; got {text!r}"
        )
    return value


def tenant_weight(text: str) -> tuple[str, float]:
    """A tenant's name and its weight, such as research=2."""
    name, equals, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    is_name = 1 <= len(name) <= TENANT_LENGTH_MAX
    if not equals or not is_name or not TENANT_WEIGHT_MIN <= weight <= TENANT_WEIGHT_MAX:
        raise ArgumentTypeError(
            f"must be NAME=W, such as research=2, with a weight from {TENANT_WEIGHT_MIN:g} to "
            f"{TENANT_WEIGHT_MAX:.0f}; got {text!r}"
        )
    return name, weight


def true_or_false(text: str) -> bool:
    """The words true and false, and nothing else."""
    match text.lower():
        case "true":
            return True
        case "false":
            return False
        case _:
            raise ArgumentTypeError(f"must be true or false, got {text!r}")


def device(text: str) -> str:
    """cpu, cuda or cuda:N."""
    if not _DEVICE.fullmatch(text):
        raise ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")
    return text


def dtype(text: str) -> str:
    """A number format that the engine computes in."""
    if text not in DTYPES:
        raise ArgumentTypeError(f"must be {' or '.join(DTYPES)}, got {text!r}")
    return text


def process_name(text: str) -> str:
    """A short name for a process, as logs and refusals show it."""
    if not _NAME.fullmatch(text):
        raise ArgumentTypeError(
            "must be 1 to 64 letters, digits, '.', '_' or '-', "
            f"beginning with a letter or digit; got {text!r}"
        )
    return text


def readable_file(text: str) -> Path:
    """A text file that can be read now."""
    path = Path(text).expanduser()
    try:
        path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ArgumentTypeError(f"must be a file that can be read; {text}: {reason}") from None
    except UnicodeDecodeError:
        raise ArgumentTypeError(f"must be a text file in UTF-8, which {text} is not") from None
    return path


def path(text: str) -> Path:
    """Any path that is not empty, with `~` replaced."""
    if not text or "\0" in text:
        raise ArgumentTypeError(f"must be a path, got {text!r}")
    return Path(text).expanduser()


def _whole(text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise ArgumentTypeError(f"must be a whole number from {least} to {most}, got {text!r}")
    return value
