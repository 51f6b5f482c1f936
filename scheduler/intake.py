"""Intake of requests: a client's `Submit` becomes a stream and an event for the core.

What is wrong whatever the pools hold is refused here, and the core never hears of it.
"""

import hashlib
import random

from tidegate.ipc.log import Log
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import Refused, RequestId, StreamId, Submit, encode
from tidegate.kvcache.unit_hashes import unit_hashes
from tidegate.kvcache.units import unit_tokens
from tidegate.scheduler.client_desk import check_submit, with_seed
from tidegate.scheduler.core import Core
from tidegate.scheduler.events import ClientId, Submitted
from tidegate.scheduler.streams import TOKEN_BYTES, Stream, Streams
from tidegate.scheduler.worker_desk import WorkerDesk

SEED_MAX = 2**63 - 1
CLIENT_ID_BYTES = 8


class Intake:
    """Names requests and seeds those that bring no seed. `epoch` is the scheduler's run.

    `cache_secret` keys the hashes of prompts, so that they tell nothing of them.
    """

    def __init__(
        self,
        core: Core,
        desk: WorkerDesk,
        streams: Streams,
        log: Log,
        epoch: str,
        seeds: random.Random,
        cache_secret: bytes,
    ) -> None:
        self._core = core
        self._desk = desk
        self._streams = streams
        self._log = log
        self._epoch = epoch
        self._seeds = seeds
        self._cache_secret = cache_secret
        self._next_stream = 0

    def submit(self, peer: bytes, submit: Submit, now_us: int) -> Refused | None:
        """The answer to a request that is refused at once; None if the core has it now."""
        refused = check_submit(submit, self._desk.card)
        if self._streams.of_client(peer, submit.request_id) is not None:
            text = "a request with this request_id is running on this connection"
            refused = Refused(submit.request_id, 409, "duplicate_request_id", text)
        self._next_stream += 1
        request_id = RequestId(f"{self._epoch}-{self._next_stream}")
        prompt_tokens = len(submit.prompt) // TOKEN_BYTES
        self._log.info(
            LogEvent.REQUEST_RECEIVED,
            request_id=request_id,
            client=client_id(peer),
            client_request_id=submit.request_id,
            prompt_tokens=prompt_tokens,
            max_tokens=submit.max_tokens,
            tenant=submit.tenant,
        )
        if refused is not None:
            self._log.info(
                LogEvent.REQUEST_REFUSED,
                request_id=request_id,
                status=refused.status,
                code=refused.code,
                text=refused.text,
                tenant=submit.tenant,
            )
            return refused
        seed = self._seeds.randint(0, SEED_MAX) if submit.seed is None else submit.seed
        stream = Stream(
            request_id,
            StreamId(self._next_stream),
            peer,
            submit,
            with_seed(submit.sampling, seed),
        )
        self._streams.add(stream)
        # A prompt that is refused is not worth the work of hashing it.
        overload = self._core.find_overload(submit.tenant, prompt_tokens, now_us)
        submitted = Submitted(
            request_id,
            client_id(peer),
            prompt_tokens,
            submit.max_tokens,
            submit.priority,
            submit.timeout_ms,
            self._unit_hashes(submit) if overload is None else (),
            submit.tenant,
            submit.total_timeout_ms,
            submit.has_stop_text,
        )
        self._core.apply(submitted, now_us)
        return None

    def _unit_hashes(self, submit: Submit) -> tuple[bytes, ...]:
        """By which the prefix cache knows the prompt; those of two tenants are never equal."""
        layout = self._desk.layout
        if layout is None or not self._core.fleet.settings.prefix_cache:
            return ()
        salt = encode((self._cache_secret, submit.tenant, submit.cache_salt))
        return unit_hashes(submit.prompt, unit_tokens(layout), salt)


def client_id(peer: bytes) -> ClientId:
    """A connection's name in the core and in logs.

    Its identity itself is a secret: whoever has it can take the connection over.
    """
    return ClientId(hashlib.blake2b(peer, digest_size=CLIENT_ID_BYTES).hexdigest())
