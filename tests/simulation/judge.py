"""What the clients are told: each token once and in order, and one last answer."""

from simulation.memory import SimulationError
from simulation.scripts import Script
from tidegate.ipc.protocol import EndReason
from tidegate.scheduler.commands import AcceptRequest, FinishRequest, RefuseRequest

Answer = FinishRequest | RefuseRequest


class Stream:
    """One request from the client's side."""

    def __init__(self, script: Script, received_us: int) -> None:
        self.script = script
        self.received_us = received_us
        self.max_tokens: int | None = None
        self.tokens: list[int] = []
        self.answer: Answer | None = None
        self.is_cancelled = False

    @property
    def due_us(self) -> int | None:
        """The nearest of its own deadlines, of which that for the first token ends with it."""
        script = self.script
        timeouts = [script.total_timeout_ms, None if self.tokens else script.timeout_ms]
        dues = [self.received_us + 1000 * each for each in timeouts if each is not None]
        return min(dues, default=None)

    @property
    def is_complete(self) -> bool:
        """It has ended as its script says, and nothing came between."""
        if not isinstance(self.answer, FinishRequest) or self.max_tokens is None:
            return False
        reason, count = self.script.outcome(self.max_tokens)
        return self.answer.reason is reason and len(self.tokens) == count


class Judge:
    """Raises `SimulationError` at the first answer that a client must not get."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self._dues: dict[str, Stream] = {}  # Those that live and have a deadline of their own.

    def submit(self, script: Script, now_us: int) -> None:
        stream = self.streams[script.request_id] = Stream(script, now_us)
        if stream.due_us is not None:
            self._dues[script.request_id] = stream

    def cancel(self, request_id: str) -> None:
        self.streams[request_id].is_cancelled = True

    def accept(self, command: AcceptRequest) -> None:
        stream = self._living(command.request_id)
        _require(stream.max_tokens is None, stream, "was accepted twice")
        asked = stream.script.max_tokens
        _require(asked is None or asked == command.max_tokens, stream, "got other max_tokens")
        stream.max_tokens = command.max_tokens

    def refuse(self, command: RefuseRequest) -> None:
        stream = self._living(command.request_id)
        _require(stream.max_tokens is None, stream, "was accepted, then refused")
        stream.answer = command
        self._dues.pop(command.request_id, None)

    def check_deadlines(self, now_us: int) -> None:
        """After a plan nobody lives whose own deadline has passed."""
        for stream in self._dues.values():
            due_us = stream.due_us
            _require(due_us is None or now_us < due_us, stream, "is past its deadline")

    def emit(self, request_id: str, first_index: int, tokens: list[int]) -> None:
        stream = self._living(request_id)
        script = stream.script
        _require(stream.max_tokens is not None, stream, "gets tokens before its answer")
        _require(first_index == len(stream.tokens), stream, "lost a token, or got one twice")
        expected = [script.token(first_index + index) for index in range(len(tokens))]
        _require(tokens == expected and bool(tokens), stream, "got wrong tokens")
        stream.tokens += tokens

    def finish(self, command: FinishRequest, now_us: int) -> None:
        stream = self._living(command.request_id)
        _require(stream.max_tokens is not None, stream, "ended before its answer")
        stream.answer = command
        self._dues.pop(command.request_id, None)
        if "its own timeout" in command.text:
            due_us = stream.due_us
            is_due = due_us is not None and now_us >= due_us
            # It is ended earlier only if it could not be in time.
            foretold = due_us is not None and "would have passed" in command.text
            _require(is_due != foretold, stream, f"times out at {now_us}: {command.text}")
            in_all = due_us == (stream.script.total_timeout_ms or 0) * 1000 + stream.received_us
            _require(in_all == ("in all" in command.text), stream, "is told a wrong deadline")
            _require(command.usage.output_tokens == len(stream.tokens), stream, "wrong usage")
        usage = command.usage
        _require(usage.prompt_tokens == stream.script.prompt_tokens, stream, "wrong usage")
        _require(usage.cached_tokens < usage.prompt_tokens, stream, "has too much cached")
        _require(usage.output_tokens <= len(stream.tokens), stream, "is billed too much")
        if command.reason in (EndReason.LENGTH, EndReason.END_TOKEN, EndReason.STOP_ID):
            _require(stream.is_complete, stream, f"ended too early: {command}")
            _require(usage.output_tokens == len(stream.tokens), stream, "wrong usage")

    def _living(self, request_id: str) -> Stream:
        stream = self.streams[request_id]
        _require(stream.answer is None, stream, "hears more after its last answer")
        return stream


def _require(holds: bool, stream: Stream, text: str) -> None:
    if not holds:
        raise SimulationError(f"request {stream.script.request_id} {text}")
