"""The table of legal moves."""

from itertools import product

import pytest

from tidegate.scheduler.phases import MOVES, Phase, check_move

LEGAL = [
    (Phase.WAITING, Phase.PREFILLING),
    (Phase.PREFILLING, Phase.HANDING_OFF),
    (Phase.PREFILLING, Phase.DECODING),
    (Phase.HANDING_OFF, Phase.DECODING),
    # Preempted, or its worker is lost.
    *(
        (phase, Phase.WAITING)
        for phase in (Phase.PREFILLING, Phase.HANDING_OFF, Phase.DECODING)
    ),
    *((phase, Phase.FINISHED) for phase in Phase if phase is not Phase.FINISHED),
]


@pytest.mark.parametrize(("old", "new"), list(product(Phase, Phase)))
def test_a_move_is_legal_or_raises(old: Phase, new: Phase) -> None:
    if (old, new) in LEGAL:
        check_move(old, new)
    else:
        with pytest.raises(AssertionError, match=f"from {old.name} to {new.name}"):
            check_move(old, new)


def test_every_phase_leads_to_the_end_and_none_beyond_it() -> None:
    assert list(MOVES) == list(Phase)
    assert all(Phase.FINISHED in moves for moves in MOVES.values() if moves)
    assert MOVES[Phase.FINISHED] == ()
