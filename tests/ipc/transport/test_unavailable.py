"""A pool into which nothing can be copied says so, ticket by ticket."""

from tidegate.ipc.protocol import (
    Fetch,
    FetchResult,
    Incarnation,
    Peer,
    PeerGone,
    PoolHandle,
    PoolId,
    RequestId,
    Ticket,
)
from tidegate.ipc.transport.interface import PageTransport
from tidegate.ipc.transport.unavailable import UnavailableTransport


def test_every_fetch_fails_with_the_reason_whatever_pools_are_known() -> None:
    transport: PageTransport = UnavailableTransport("no way in")
    pool, incarnation = PoolId("p"), Incarnation(1)
    transport.attach(Peer(pool, incarnation, PoolHandle("none", "", 0, ())))
    fetch = Fetch(Ticket(3), RequestId("r"), pool, incarnation, (), 5)
    assert transport.fetch(fetch) == FetchResult(Ticket(3), "no way in", 0, 0)
    transport.detach(PeerGone(pool, incarnation))
    assert transport.fetch(fetch).error == "no way in"
    transport.close()
