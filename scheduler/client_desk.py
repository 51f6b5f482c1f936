"""The shell's side of client links: frames checked and turned into events or replies."""

from collections.abc import Sequence

import msgspec
import numpy as np

from tidegate.ipc.protocol import (
    MalformedIds,
    ModelCard,
    Refused,
    RequestId,
    Sampling,
    Submit,
    Waiting,
    WaitKind,
    unpack_ids,
)
from tidegate.scheduler.core import Core
from tidegate.scheduler.streams import Streams
from tidegate.scheduler.waits import Explainer

TEMPERATURE_MAX = 100.0
STOP_ID_COUNT_MAX = 256
REQUEST_ID_LENGTH_MAX = 256
TENANT_LENGTH_MAX = 256
TIMEOUT_MS_MAX = 7 * 24 * 3600 * 1000
SEED_RANGE = (-(2**63), 2**63 - 1)


def check_submit(submit: Submit, card: ModelCard | None) -> Refused | None:
    """Refuse what is wrong whatever the pools hold; the core's door sees to the rest."""
    if not submit.request_id or len(submit.request_id) > REQUEST_ID_LENGTH_MAX:
        text = f"request_id must have 1 to {REQUEST_ID_LENGTH_MAX} characters"
        return _refused(submit, 400, "bad_request_id", text)
    if len(submit.prompt) % 4:
        return _refused(submit, 400, "bad_prompt", "prompt is not a list of uint32 token ids")
    try:
        stop_ids = unpack_ids(submit.stop_ids)
    except MalformedIds as error:
        return _refused(submit, 400, "bad_stop_ids", f"stop_ids: {error}")
    if len(stop_ids) > STOP_ID_COUNT_MAX:
        text = f"stop_ids: at most {STOP_ID_COUNT_MAX}, got {len(stop_ids)}"
        return _refused(submit, 400, "bad_stop_ids", text)
    if len(submit.tenant) > TENANT_LENGTH_MAX:
        text = f"tenant must have {TENANT_LENGTH_MAX} characters at most"
        return _refused(submit, 400, "bad_tenant", text)
    for name, timeout_ms in (
        ("timeout_ms", submit.timeout_ms),
        ("total_timeout_ms", submit.total_timeout_ms),
    ):
        if timeout_ms is not None and not 1 <= timeout_ms <= TIMEOUT_MS_MAX:
            text = f"{name} must be 1 to {TIMEOUT_MS_MAX}, got {timeout_ms}"
            return _refused(submit, 400, "bad_timeout", text)
    fault = _sampling_fault(submit.sampling, submit.seed)
    if fault is not None:
        return _refused(submit, 400, "bad_sampling", fault)
    if card is None:
        return None  # The core refuses it for want of a worker.
    if submit.model not in ("", card.name):
        text = f"model {submit.model!r} is not served here; {card.name!r} is"
        return _refused(submit, 404, "model_not_found", text)
    tokens = np.frombuffer(submit.prompt, dtype="<u4")
    if tokens.size and int(tokens.max()) >= card.vocab_size:
        text = (
            f"token id {int(tokens.max())} is not in the vocabulary, "
            f"whose ids are 0 to {card.vocab_size - 1}"
        )
        return _refused(submit, 400, "bad_token_id", text)
    return None


def answer_why(
    core: Core, streams: Streams, questions: Sequence[tuple[bytes, RequestId]]
) -> list[tuple[bytes, Waiting]]:
    """The answer to each question of a connection about a request of its own, after a plan."""
    explainer = Explainer(core.fleet)
    answers: list[tuple[bytes, Waiting]] = []
    for peer, name in questions:
        stream = streams.of_client(peer, name)
        if stream is None:
            name = RequestId(name[:REQUEST_ID_LENGTH_MAX])
            text = f"no request {name!r} is alive on this connection; it may have ended"
            answer = Waiting(name, None, WaitKind.NOTHING, text)
        else:
            answer = explainer.explain(core.fleet.requests[stream.request_id])
        answers.append((peer, msgspec.structs.replace(answer, request_id=name)))
    return answers


def with_seed(sampling: Sampling, seed: int) -> Sampling:
    return msgspec.structs.replace(sampling, seed=seed)


def _sampling_fault(sampling: Sampling, seed: int | None) -> str | None:
    if not 0 <= sampling.temperature <= TEMPERATURE_MAX:
        return f"temperature must be 0 to {TEMPERATURE_MAX:g}, got {sampling.temperature}"
    if sampling.top_k < 0:
        return f"top_k must be at least 0 (0 is off), got {sampling.top_k}"
    if not 0 <= sampling.top_p <= 1:
        return f"top_p must be 0 to 1, got {sampling.top_p}"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p must be 0 to 1, got {sampling.min_p}"
    if seed is not None and not SEED_RANGE[0] <= seed <= SEED_RANGE[1]:
        return f"seed must fit 64 bits, got {seed}"
    return None


def _refused(submit: Submit, status: int, code: str, text: str) -> Refused:
    return Refused(RequestId(submit.request_id), status, code, text)
