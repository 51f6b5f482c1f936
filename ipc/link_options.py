"""What all links share: bounds, socket options and errors.

A link carries whole frames, in order, between the scheduler and its peers. ZeroMQ itself keeps
a short queue to each peer; the scheduler's side has a bounded outbox behind it (`outbox`).
"""

from collections.abc import Mapping

import msgspec

from tidegate.ipc.protocol import FRAME_BYTES_MAX
from tidegate.ipc.zmq_context import SocketOption

RECEIVE_COUNT_MAX = 256  # Frames taken at a time.
RECONNECT_MS_MIN = 50
RECONNECT_MS_MAX = 1000


class LinkError(Exception):
    """A frame cannot be sent."""


class FrameTooLargeError(LinkError):
    """The frame is larger than any receiver accepts."""


class SendTimeoutError(LinkError):
    """The other side took nothing for the time that was allowed."""


class LinkOptions(msgspec.Struct, frozen=True):
    """How a link's socket is set up.

    `extra` are more socket options by their lower-case names. CURVE keys go there: the server
    has `curve_server`, `curve_publickey`, `curve_secretkey`; a peer has `curve_serverkey` and
    its own two.
    """

    receive_bytes_max: int = FRAME_BYTES_MAX  # A larger frame ends its sender's connection.
    receive_frames_max: int = 64  # ZeroMQ's own queue from each peer.
    send_frames_max: int = 64  # ZeroMQ's own queue to each peer.
    extra: Mapping[str, SocketOption] = msgspec.field(default_factory=dict[str, SocketOption])

    def for_socket(self) -> dict[str, SocketOption]:
        """Options by name, as `zmq_trio.Socket` takes them."""
        return {
            "maxmsgsize": self.receive_bytes_max,
            "rcvhwm": self.receive_frames_max,
            "sndhwm": self.send_frames_max,
            "reconnect_ivl": RECONNECT_MS_MIN,
            "reconnect_ivl_max": RECONNECT_MS_MAX,
            **self.extra,
        }


def check_frame(frame: bytes) -> None:
    """Raise `FrameTooLargeError` for a frame that no receiver would accept."""
    if len(frame) > FRAME_BYTES_MAX:
        raise FrameTooLargeError(
            f"a frame of {len(frame)} bytes is over the bound of {FRAME_BYTES_MAX}"
        )
