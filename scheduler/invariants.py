"""What must always hold of a request and of each of its seats."""

from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.row_arrays import NO_EVENT
from tidegate.scheduler.state import Request, Seat


def check_request(request: Request) -> None:
    source, target = request.source, request.target
    if request.early is None:
        # A pull is under way if and only if the request is being handed over.
        is_pulling = request.phase is Phase.HANDING_OFF and target is not None
        assert (request.ticket is not None) == is_pulling
    else:
        assert request.phase in (Phase.PREFILLING, Phase.HANDING_OFF) and target is None
    match request.phase:
        case Phase.WAITING | Phase.FINISHED:
            assert source is None and target is None
        case Phase.PREFILLING:
            assert source is not None and target is None
        case Phase.HANDING_OFF:
            assert source is not None and source.is_ended
            assert request.output_count >= 1
        case Phase.DECODING:
            assert (source is None) != (target is None)
    assert request.phase is Phase.FINISHED or request.timer_us is not None, "no deadline"
    assert request.account.has_begun == request.has_rank


def check_seat(seat: Seat) -> None:
    request, rows = seat.request, seat.worker.rows
    covered = Tokens(rows.covered.item(seat.row))
    assert covered in (0, seat.holding.covered), "pages that the arrays do not know"
    assert rows.settled_before[seat.row] == request.lengths.prompt - 1
    assert seat.is_early == (request.early is seat)
    if seat.next_event == NO_EVENT:
        return
    # Whatever `advance` lets pass is an answer that can be.
    assert seat.is_started and not seat.is_ended and seat.may_grow
    assert not seat.awaits_token
    assert seat.next_event <= min(covered, seat.lengths.end)
