"""What a simulated request asks for, and every token that it must be given."""

import msgspec

from tidegate.ipc.protocol import EndReason, RequestId, pack_ids
from tidegate.kvcache.layout import Tokens
from tidegate.kvcache.unit_hashes import unit_hashes

END_TOKEN = 0
STOP_TOKEN = 1
VOCABULARY = 1 << 31
FAMILIES_FROM = 1 << 20  # Authors from here on are families; below they are requests.


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
    family: int = 0
    shared_tokens: int = 0  # So long its prompt is that of its whole family.
    tenant: str = ""
    total_timeout_ms: int | None = None
    has_stop_text: bool = False

    @property
    def request_id(self) -> RequestId:
        return RequestId(f"r{self.number}")

    def author(self, position: int) -> int:
        """Who stands for all tokens up to this position: the family, or the request itself."""
        return FAMILIES_FROM + self.family if position < self.shared_tokens else self.number

    def authors(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """(author, first position, end) for the stretches of [start, end)."""
        cut = min(max(start, self.shared_tokens), end)
        stretches = [(self.author(start), start, cut), (self.number, cut, end)]
        return [stretch for stretch in stretches if stretch[1] < stretch[2]]

    def prompt_token(self, position: int) -> int:
        return 2 + (self.author(position) * 7919 + position * 104_729) % (VOCABULARY - 2)

    def unit_hashes(self, unit: Tokens) -> tuple[bytes, ...]:
        """Of its prompt, as the shell would compute them."""
        tokens = pack_ids(map(self.prompt_token, range(self.prompt_tokens)))
        return unit_hashes(tokens, unit, b"")

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
