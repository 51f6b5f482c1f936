"""The phases of a request, and the legal moves between them.

1. WAITING: accepted; it waits for a row and pages of a prefill worker. A request that is
   preempted comes back here with the tokens that it has brought.
2. PREFILLING: its prompt runs in chunks.
3. HANDING_OFF: the prompt is done; a decode worker is found and copies the pages.
4. DECODING: one token after the other.
5. FINISHED: the client has its last message. Pages may still drain.
"""

from tidegate.ipc.protocol import Phase as Phase

MOVES: dict[Phase, tuple[Phase, ...]] = {
    Phase.WAITING: (Phase.PREFILLING, Phase.FINISHED),
    # Without a hand-off (one token, or role both) a row goes on decoding where it is.
    Phase.PREFILLING: (
        Phase.HANDING_OFF,
        Phase.DECODING,
        Phase.WAITING,
        Phase.FINISHED,
    ),
    Phase.HANDING_OFF: (Phase.DECODING, Phase.WAITING, Phase.FINISHED),
    Phase.DECODING: (Phase.WAITING, Phase.FINISHED),
    Phase.FINISHED: (),
}


def check_move(old: Phase, new: Phase) -> None:
    assert new in MOVES[old], f"a request may not move from {old.name} to {new.name}"
