"""What is behind the proxy: the scheduler, and the model that it serves."""

from collections.abc import Sequence

import msgspec
import trio

from tidegate.clients.async_client import AsyncClient
from tidegate.clients.chat_template import ChatTemplate, ChatTemplateError
from tidegate.clients.errors import RequestFailed, TextUnavailable
from tidegate.clients.generation import Generation
from tidegate.clients.proxy.errors import ApiError
from tidegate.clients.proxy.fields import CommonFields, sampling_of, stop_ids, stop_texts
from tidegate.clients.tokeniser import Tokeniser
from tidegate.ipc.protocol import ModelCard, Status

CARD_POLL_S = 0.1
STATUS_MS_MAX = 2_000


class ServedModel(msgspec.Struct, frozen=True):
    """The model, with what its text needs. `template_problem` says why there is no template."""

    card: ModelCard
    tokeniser: Tokeniser
    template: ChatTemplate | None
    template_problem: str


class Backend:
    """`chat_template` is used in place of the model's own if it is given."""

    def __init__(self, client: AsyncClient, chat_template: str | None) -> None:
        self._client = client
        self._chat_template = chat_template
        self._model: ServedModel | None = None
        self._stopping = False

    async def load(self) -> None:
        """Wait until a worker has joined, and load the model's tokenizer."""
        while True:
            try:
                tokeniser = await self._client.tokeniser()
            except TextUnavailable:
                await trio.sleep(CARD_POLL_S)
            else:
                self._model = self._served(tokeniser)
                return

    def _served(self, tokeniser: Tokeniser) -> ServedModel:
        card = tokeniser.card
        source = self._chat_template or card.chat_template
        if source is None:
            problem = (
                f"the model {card.name!r} has no chat template: use /v1/completions, or give "
                "the server one with --chat-template FILE"
            )
            return ServedModel(card, tokeniser, None, problem)
        try:
            template = ChatTemplate(
                source, tokeniser.token_text(card.bos_id), tokeniser.end_token_text()
            )
        except ChatTemplateError as error:
            problem = f"{error}: give the server another with --chat-template FILE"
            return ServedModel(card, tokeniser, None, problem)
        return ServedModel(card, tokeniser, template, "")

    @property
    def not_ready_reason(self) -> str:
        """Why the proxy itself cannot serve; empty if it can."""
        if self._stopping:
            return "the server is shutting down"
        return "" if self._model is not None else "no worker has joined yet"

    @property
    def model(self) -> ServedModel:
        """Raises `ApiError` 503 while it is not known."""
        reason = self.not_ready_reason
        if reason or self._model is None:
            code = "shutting_down" if self._stopping else "not_ready"
            raise ApiError(503, reason, code=code)
        return self._model

    def generate(
        self, prompt: Sequence[int], fields: CommonFields, max_tokens: int | None, tenant: str
    ) -> Generation:
        """A request that is not sent before it is started."""
        sampling = sampling_of(fields)
        return self._client.generate(
            prompt,
            model=self.model.card.name,
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=fields.seed,
            stop=stop_texts(fields),
            stop_token_ids=stop_ids(fields, self.model.card),
            ignore_eos=fields.ignore_eos or False,
            cache_salt=fields.cache_salt or "",
            tenant=tenant,
            timeout_ms=fields.timeout_ms,
            total_timeout_ms=fields.total_timeout_ms,
        )

    async def status(self) -> Status:
        """The scheduler's status. Raises `ApiError` 503 when it does not answer in time."""
        with trio.move_on_after(STATUS_MS_MAX / 1000):
            return await self._client.status()
        raise ApiError(503, "the scheduler does not answer", code="scheduler_silent")

    def refuse_new(self) -> None:
        """From now on new requests are refused; running ones go on."""
        self._stopping = True

    def end_all(self) -> None:
        """End running requests with an error: the server stops."""
        self.refuse_new()
        self._client.fail_all(
            RequestFailed("the server is shutting down", 503, "shutting_down")
        )
