"""What may be asked of a generation, with its defaults."""

from collections.abc import Sequence
from typing import TypedDict

import msgspec

from tidegate.ipc.protocol import RequestId, Sampling, Submit, pack_ids

TOKEN_ID_MAX = 2**32 - 1


class Options(TypedDict, total=False):
    """Keyword arguments of `generate` and `complete`; `Filled` tells their defaults."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    detokenise: bool
    model: str
    priority: int
    tenant: str
    cache_salt: str
    timeout_ms: int | None
    total_timeout_ms: int | None


class Filled(msgspec.Struct, frozen=True, kw_only=True):
    """`Options` with defaults filled in. A name that is none raises `TypeError`."""

    max_tokens: int | None = None  # As the server's setting says; the result tells.
    temperature: float = 0.0  # Greedy.
    top_k: int = 0  # Off.
    top_p: float = 1.0  # Off.
    min_p: float = 0.0  # Off.
    seed: int | None = None  # The server draws one; the result tells.
    stop: str | Sequence[str] = ()  # Texts in front of which the answer ends.
    stop_token_ids: Sequence[int] = ()  # The answer ends with one of these.
    ignore_eos: bool = False  # Go on after the model's end token.
    detokenise: bool = True  # False: ids only, and no tokenizer is needed.
    model: str = ""  # The one that is served.
    priority: int = 0
    tenant: str = ""  # For whom: service is shared between tenants.
    cache_salt: str = ""  # Only prompts with the same one share cached pages.
    timeout_ms: int | None = None  # Until the first token; None: as the server's setting says.
    total_timeout_ms: int | None = None  # Until the end; what came before is kept.

    def stops(self) -> Sequence[str]:
        """Raises `ValueError` for stop strings that cannot be searched for."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if stops and not self.detokenise:
            raise ValueError("stop strings are text: they need detokenise=True")
        if "" in stops:
            raise ValueError("stop: a stop string must not be empty")
        return stops

    def submit(self, prompt: Sequence[int]) -> Submit:
        """The message, as yet without a name. Raises `ValueError` for ids that are none."""
        return Submit(
            request_id=RequestId(""),
            model=self.model,
            prompt=pack_token_ids("prompt", prompt),
            max_tokens=self.max_tokens,
            sampling=Sampling(self.temperature, self.top_k, self.top_p, self.min_p),
            seed=self.seed,
            stop_ids=pack_token_ids("stop_token_ids", self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            has_stop_text=bool(self.stops()),
            tenant=self.tenant,
            priority=self.priority,
            timeout_ms=self.timeout_ms,
            cache_salt=self.cache_salt,
            total_timeout_ms=self.total_timeout_ms,
        )


def pack_token_ids(name: str, ids: Sequence[int]) -> bytes:
    """Raises `ValueError`, which names the argument and the first id that is none."""
    for token_id in ids:
        if not 0 <= token_id <= TOKEN_ID_MAX:
            raise ValueError(f"{name}: {token_id} is no token id; they are 0 to {TOKEN_ID_MAX}")
    return pack_ids(ids)
