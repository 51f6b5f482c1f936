"""What the clients are told: each token once and in order, and one last answer."""

from simulation.memory import SimulationError
from simulation.scripts import Script
from tidegate.ipc.protocol import EndReason
from tidegate.scheduler.commands import AcceptRequest, FinishRequest, RefuseRequest

Answer = FinishRequest | RefuseRequest


class Stream:
    """One request from the client's side."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.max_tokens: int | None = None
        self.tokens: list[int] = []
        self.answer: Answer | None = None
        self.is_cancelled = False

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

    def submit(self, script: Script) -> None:
        self.streams[script.request_id] = Stream(script)

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

    def emit(self, request_id: str, first_index: int, tokens: list[int]) -> None:
        stream = self._living(request_id)
        script = stream.script
        _require(stream.max_tokens is not None, stream, "gets tokens before its answer")
        _require(first_index == len(stream.tokens), stream, "lost a token, or got one twice")
        expected = [script.token(first_index + index) for index in range(len(tokens))]
        _require(tokens == expected and bool(tokens), stream, "got wrong tokens")
        stream.tokens += tokens

    def finish(self, command: FinishRequest) -> None:
        stream = self._living(command.request_id)
        _require(stream.max_tokens is not None, stream, "ended before its answer")
        stream.answer = command
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
