"""Server-sent events: the bytes of one event."""

import msgspec

DONE = b"data: [DONE]\n\n"

# JSON may hold these characters as they are, but some readers of streams end a line at them.
_LINE_ENDS = [(char.encode(), b"\\u%04x" % ord(char)) for char in "\x85\u2028\u2029"]


def event_of(payload: msgspec.Struct) -> bytes:
    """One event with the payload as JSON."""
    data = msgspec.json.encode(payload)
    if not data.isascii():
        for character, escape in _LINE_ENDS:
            data = data.replace(character, escape)
    return b"data: " + data + b"\n\n"
