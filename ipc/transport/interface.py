"""What every page transport offers to the worker that pulls."""

from typing import Protocol

from tidegate.ipc.protocol import Fetch, FetchResult, Peer, PeerGone


class PageTransport(Protocol):
    """Pulls pages out of other workers' pools. No method raises for what a peer does wrong."""

    def attach(self, peer: Peer) -> None:
        """Make a pool known. If it cannot be reached, fetches from it will say why."""
        ...

    def detach(self, gone: PeerGone) -> None:
        """Forget a pool and let go of its memory. Fine if it was never known."""
        ...

    def fetch(self, fetch: Fetch) -> FetchResult:
        """Copy every page of `fetch`, or none: then `error` says what does not match."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...
