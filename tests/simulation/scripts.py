"""What a simulated request asks for, and every token that it must be given."""

import msgspec

from tidegate.ipc.protocol import EndReason, RequestId

END_TOKEN = 0
STOP_TOKEN = 1
VOCABULARY = 1 << 31


class Script(msgspec.Struct, frozen=True):
    """One request. Its model would end it by itself at output index `ends_at`, if any.

    `number` is unique in a run; the tokens that it samples depend on nothing else.
    """

    number: int
    prompt_tokens: int
    max_tokens: int | None
    ends_at: int | None = None
    ends_with: EndReason = EndReason.END_TOKEN
    priority: int = 0
    timeout_ms: int | None = None

    @property
    def request_id(self) -> RequestId:
        return RequestId(f"r{self.number}")

    def prompt_token(self, position: int) -> int:
        return 2 + (self.number * 7919 + position * 104_729) % (VOCABULARY - 2)

    def token(self, index: int) -> int:
        """The token with this output index."""
        if index == self.ends_at:
            return END_TOKEN if self.ends_with is EndReason.END_TOKEN else STOP_TOKEN
        return 2 + (self.number * 15_485_863 + index * 32_452_843 + 1) % (VOCABULARY - 2)

    def outcome(self, max_tokens: int) -> tuple[EndReason, int]:
        """How it ends if nothing comes between, and after how many tokens."""
        if self.ends_at is not None and self.ends_at < max_tokens:
            return self.ends_with, self.ends_at + 1
        return EndReason.LENGTH, max_tokens


def script_of(request_id: RequestId, scripts: dict[int, Script]) -> Script:
    return scripts[int(request_id[1:])]
