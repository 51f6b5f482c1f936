"""Hello until an answer comes, over a link in memory with a clock of its own."""

import pytest

from fakes.cards import card_of
from fakes.memory_link import MemoryLink
from fakes.tiny_tokenizers import byte_level
from tidegate.engine.failures import LinkBroken, WorkerRejected
from tidegate.engine.joining import join
from tidegate.ipc.protocol import (
    PROTOCOL_VERSION,
    Fingerprint,
    Hello,
    Incarnation,
    Plan,
    PlanSeq,
    PoolHandle,
    PoolId,
    Role,
    Welcome,
    WorkerId,
    WorkerRefused,
    encode,
)
from tidegate.kvcache.layout import All, Group, Layout, Tokens

HELLO = Hello(
    PROTOCOL_VERSION,
    WorkerId("w"),
    Role.BOTH,
    1,
    Fingerprint("m", "float32", Layout((Group("full", All(), Tokens(4), ()),), None)),
    card_of(byte_level()),
    PoolHandle("none", "", 0, (4,)),
    8,
)
WELCOME = Welcome(PROTOCOL_VERSION, "epoch", PoolId("w/1"), Incarnation(1), 8, 1000)
PLAN = Plan(PlanSeq(1), ())


def do_join(link: MemoryLink, said: list[str] | None = None) -> tuple[Welcome, list[bytes]]:
    said = [] if said is None else said
    return join(link, HELLO, said.append, link.clock)


def test_hello_is_sent_about_once_a_second_until_the_scheduler_answers() -> None:
    link = MemoryLink()
    link.on_poll = lambda: link.arrive(WELCOME) if len(link.waits_ms) == 5 else None
    assert do_join(link) == (WELCOME, [])
    assert link.sent == [HELLO] * 6
    assert link.now_s == 1005


def test_nothing_is_sent_before_the_connection_is_up() -> None:
    link = MemoryLink()
    link.connected = False

    def connect() -> None:
        if len(link.waits_ms) == 30:
            link.connected = True
        if link.sent:
            link.arrive(WELCOME)

    link.on_poll = connect
    said: list[str] = []
    do_join(link, said)
    assert link.sent == [HELLO]
    assert len(said) == 4, "it says that it waits, but not every second"


def test_frames_right_behind_the_welcome_are_handed_on() -> None:
    link = MemoryLink()
    link.arrive(WELCOME, PLAN)
    assert do_join(link) == (WELCOME, [encode(PLAN)])


def test_a_refusal_ends_it_with_the_reason() -> None:
    link = MemoryLink()
    link.arrive(WorkerRefused("another model"))
    with pytest.raises(WorkerRejected, match="another model"):
        do_join(link)


@pytest.mark.parametrize("frame", [encode(PLAN), b"garbage", encode(HELLO)])
def test_an_answer_that_cannot_be_ends_it(frame: bytes) -> None:
    link = MemoryLink()
    link.inbox.append(frame)
    with pytest.raises(LinkBroken):
        do_join(link)
