"""The transport of a pool into which nothing can be copied: every fetch says so."""

from tidegate.ipc.protocol import Fetch, FetchResult, Peer, PeerGone


class UnavailableTransport:
    """Answers every fetch with `reason`."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def attach(self, peer: Peer) -> None:
        pass

    def detach(self, gone: PeerGone) -> None:
        pass

    def fetch(self, fetch: Fetch) -> FetchResult:
        return FetchResult(fetch.ticket, self._reason, 0, 0)

    def close(self) -> None:
        pass
