"""Outboxes: bounds for each peer and for all, order, and nothing slips past a refusal."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tidegate.ipc.outbox import OutboxBounds, Outboxes

PEERS = st.sampled_from([b"a", b"b", b"c"])


def test_frames_come_back_in_the_order_in_which_they_went_in() -> None:
    outboxes = Outboxes(OutboxBounds())
    for frame in (b"1", b"2", b"3"):
        assert outboxes.add(b"peer", frame)
    assert (outboxes.count(b"peer"), outboxes.count(b"other")) == (3, 0)
    taken: list[bytes | None] = []
    while b"peer" in outboxes:
        taken.append(outboxes.head(b"peer"))
        outboxes.pop(b"peer")
    assert taken == [b"1", b"2", b"3"]
    assert outboxes.head(b"peer") is None


def test_the_frame_bound_counts_frames() -> None:
    outboxes = Outboxes(OutboxBounds(frame_count_max=2))
    assert [outboxes.add(b"peer", b"") for _ in range(3)] == [True, True, False]


def test_the_byte_bound_counts_bytes() -> None:
    outboxes = Outboxes(OutboxBounds(byte_count_max=10, total_byte_count_max=100))
    assert outboxes.add(b"peer", bytes(10))
    assert not outboxes.add(b"peer", b"x")
    assert outboxes.add(b"other", b"x")


def test_the_bound_on_all_peers_counts_them_together() -> None:
    outboxes = Outboxes(OutboxBounds(byte_count_max=10, total_byte_count_max=15))
    assert outboxes.add(b"a", bytes(10))
    assert not outboxes.add(b"b", bytes(6))
    assert outboxes.add(b"c", bytes(5))


def test_nothing_slips_past_a_frame_that_was_turned_away() -> None:
    outboxes = Outboxes(OutboxBounds(frame_count_max=2))
    outboxes.add(b"peer", b"1")
    outboxes.add(b"peer", b"2")
    assert not outboxes.add(b"peer", b"3")
    outboxes.pop(b"peer")
    assert not outboxes.add(b"peer", b"4"), "it would come without the third"
    outboxes.pop(b"peer")
    assert outboxes.add(b"peer", b"5"), "the peer has taken all that waited"


def test_discarding_makes_room_at_once() -> None:
    outboxes = Outboxes(OutboxBounds(frame_count_max=1))
    outboxes.add(b"peer", b"1")
    assert not outboxes.add(b"peer", b"2")
    assert outboxes.discard(b"peer") == 1
    assert outboxes.discard(b"peer") == 0
    assert outboxes.byte_count == 0
    assert outboxes.add(b"peer", b"3")


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"frame_count_max": 0}, "frame_count_max is 0; it must be 1 or more"),
        ({"byte_count_max": 0}, "byte_count_max is 0; it must be from 1 to"),
        (
            {"byte_count_max": 6, "total_byte_count_max": 5},
            "byte_count_max is 6; it must be from 1 to total_byte_count_max, which is 5",
        ),
    ],
)
def test_bounds_that_do_not_fit_are_refused(bounds: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OutboxBounds(**bounds)


class OutboxMachine(RuleBasedStateMachine):
    """Against a plain model: what was accepted and not yet taken, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.outboxes = Outboxes(OutboxBounds(4, 12, 20))
        self.model: dict[bytes, deque[bytes]] = {}

    @rule(peer=PEERS, frame=st.binary(max_size=13))
    def add(self, peer: bytes, frame: bytes) -> None:
        if self.outboxes.add(peer, frame):
            self.model.setdefault(peer, deque()).append(frame)

    @rule(peer=PEERS)
    def take(self, peer: bytes) -> None:
        frames = self.model.get(peer)
        assert self.outboxes.head(peer) == (frames[0] if frames else None)
        if frames:
            self.outboxes.pop(peer)
            frames.popleft()

    @rule(peer=PEERS)
    def discard(self, peer: bytes) -> None:
        assert self.outboxes.discard(peer) == len(self.model.pop(peer, ()))

    @invariant()
    def books_are_right(self) -> None:
        self.outboxes.check()
        assert set(self.outboxes.peers()) == {p for p, frames in self.model.items() if frames}


TestOutboxMachine = OutboxMachine.TestCase
TestOutboxMachine.settings = settings(max_examples=40, deadline=None)
