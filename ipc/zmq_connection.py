"""The state of a socket's connection, as ZeroMQ's events tell it."""

import struct

import zmq

CONNECTION_EVENTS = int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)


class Connection:
    """The state of a socket's one connection, as its events tell it."""

    def __init__(self) -> None:
        self.up = False
        self.loss_count = 0  # How often an established connection was lost.

    @property
    def lost(self) -> bool:
        return self.loss_count > 0 and not self.up

    def apply(self, message: list[bytes]) -> None:
        """Take in one message of the socket's event stream: an event and an address."""
        event, _ = struct.unpack("=HI", message[0])
        up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self.up and not up:
            self.loss_count += 1
        self.up = up
