"""When the tokens of several streams came, and the speed of the streams together.

Only the time counts in which all of them decode: from when the last has its second token. The
tokens of one launch come one after another, so each stream is timed for itself, between two of
its own tokens. Counting all tokens between two moments instead would cut through the first and
the last launch, and miss nearly one of them.
"""


class Arrivals:
    """Arrivals of `stream_count` streams, in seconds of one clock that never goes back."""

    def __init__(self, stream_count: int) -> None:
        self._times: list[list[float]] = [[] for _ in range(stream_count)]
        self._firsts: list[int] = []  # Index of the first token that counts, of each stream.
        self._waiting_count = stream_count

    def note(self, stream: int, time: float) -> None:
        """One more token of `stream`."""
        times = self._times[stream]
        times.append(time)
        if len(times) == 2:
            self._waiting_count -= 1
            if not self._waiting_count:
                # Each stream's newest token is of this launch, or of the one before.
                self._firsts = [len(times) for times in self._times]

    def steps(self, stream: int) -> int:
        """Times between two tokens of the stream, since all streams decode."""
        if self._waiting_count:
            return 0
        return max(0, len(self._times[stream]) - self._firsts[stream] - 1)

    def tokens_per_s(self) -> float:
        """Of all streams together. Each must have taken one step."""
        speed = 0.0
        for stream, times in enumerate(self._times):
            first = times[self._firsts[stream]]
            speed += self.steps(stream) / (times[-1] - first)
        return speed

    def fed_tokens(self) -> float:
        """How many of its tokens a stream had been fed, on average over streams and steps."""
        middles = [
            (first + len(t)) / 2 for first, t in zip(self._firsts, self._times, strict=True)
        ]
        return sum(middles) / len(middles)
