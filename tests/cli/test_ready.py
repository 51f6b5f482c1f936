"""What a server prints when it is ready, and how it finds out that it is."""

import json
import shlex
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from tidegate.cli.readiness import is_healthy, wait_ready
from tidegate.cli.ready import Served, curl_line, ready_text
from tidegate.cli.supervisor import NotReady
from tidegate.ipc.protocol import PoolState, Role, Status, WorkerId

SERVED = Served(
    url="http://127.0.0.1:8000",
    model="gemma3-270m",
    has_chat_template=False,
    device="cpu",
    dtype="bfloat16",
    log=Path("/state/log.jsonl"),
    client_endpoint="ipc:///run/clients.sock",
)


def pool(worker: str, role: Role, name: str, page_count: int) -> PoolState:
    return PoolState(WorkerId(worker), role, name, 16, 49152, page_count, page_count, 0)


STATUS = Status(
    ready=True,
    reason="",
    epoch="e",
    model="gemma3-270m",
    waiting=0,
    running=0,
    longest_prompt=32768,
    default_max_tokens=1024,
    pools=(
        pool("decode-0", Role.DECODE, "full", 2048),
        pool("prefill-0", Role.PREFILL, "full", 4096),
        pool("prefill-0", Role.PREFILL, "window", 1024),
    ),
    caches=(),
)


def test_the_text_names_all_that_a_user_needs() -> None:
    assert ready_text(SERVED, STATUS) == (
        "\n"
        "tidegate serves gemma3-270m at http://127.0.0.1:8000  (bfloat16 on cpu)\n"
        "\n"
        "  worker     pool    tokens        pages      bytes\n"
        "  prefill-0  full    65,536  4,096 of 16  192.0 MiB\n"
        "  prefill-0  window  16,384  1,024 of 16   48.0 MiB\n"
        "  decode-0   full    32,768  2,048 of 16   96.0 MiB\n"
        "\n"
        "  longest prompt         32,768 tokens\n"
        "  max_tokens, if absent  1,024 (--default-max-tokens)\n"
        "  log                    /state/log.jsonl\n"
        "  for tidegate.Client    ipc:///run/clients.sock\n"
        "\n"
        "Try it:\n"
        "\n"
        f"  {curl_line(SERVED)}\n"
        "\n"
        "Ctrl-C stops it.\n"
    )


@pytest.mark.parametrize(
    ("has_template", "path", "field"),
    [(True, "/v1/chat/completions", "messages"), (False, "/v1/completions", "prompt")],
)
def test_the_line_to_paste_fits_the_model(has_template: bool, path: str, field: str) -> None:
    served = msgspec.structs.replace(SERVED, has_chat_template=has_template, model="it's mine")
    words = shlex.split(curl_line(served))
    assert words[:2] == ["curl", f"http://127.0.0.1:8000{path}"]
    body = json.loads(words[-1])
    assert body["model"] == "it's mine"
    assert body[field]


async def answer_health(status: str, stream: trio.SocketStream) -> None:
    async with stream:
        request = await stream.receive_some(4096)
        assert request.startswith(b"GET /health HTTP/1.1\r\n")
        await stream.send_all(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())


@pytest.mark.parametrize(
    ("status", "healthy"), [("200 OK", True), ("503 Service Unavailable", False)]
)
async def test_health_is_what_the_proxy_says(status: str, healthy: bool) -> None:
    async with trio.open_nursery() as nursery:
        listeners: list[trio.SocketListener] = await nursery.start(
            partial(trio.serve_tcp, partial(answer_health, status), 0, host="127.0.0.1")
        )
        port = listeners[0].socket.getsockname()[1]
        assert await is_healthy("127.0.0.1", port) is healthy
        nursery.cancel_scope.cancel()


async def test_a_closed_port_is_not_healthy() -> None:
    with trio.socket.socket() as probe:
        await probe.bind(("127.0.0.1", 0))
        assert not await is_healthy("127.0.0.1", probe.getsockname()[1])


async def test_a_server_that_never_answers_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotReady, match=r"after 0\.2 s: the scheduler does not answer"):
        await wait_ready(f"ipc://{tmp_path}/none.sock", "127.0.0.1", 9, timeout_s=0.2)
