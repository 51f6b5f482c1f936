"""A fake scheduler in a folder of its own."""

import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from fakes.cards import card_of
from fakes.fake_scheduler import FakeScheduler, open_fake_scheduler
from fakes.templates import CHATML
from fakes.tiny_tokenizers import END, byte_level
from tidegate.ipc.protocol import ModelCard


@pytest.fixture
def card() -> ModelCard:
    return card_of(byte_level(), chat_template=CHATML, eos_tokens=(END,))


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """Short, since the path of a socket may have 107 bytes only."""
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:
        yield Path(folder)


@pytest.fixture
async def scheduler(socket_folder: Path, card: ModelCard) -> AsyncGenerator[FakeScheduler]:
    async with open_fake_scheduler(socket_folder, card) as scheduler:
        scheduler.answer = byte_level().encode("the cat sat on the mat. ").ids
        yield scheduler
