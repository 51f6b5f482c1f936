"""What benchmarks of a whole server share: the server itself, its streams, and the bare loop.

The server is `tidegate serve` in its own processes. The bare loop runs the same model in this
process: programs that use it set OMP_WAIT_POLICY before torch is loaded, as workers do.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import trio

from arrivals import Arrivals
from tidegate import AsyncClient
from tidegate.engine.bare_loop import BareLoop
from tidegate.engine.loading import LoadedEngine, load_engine
from tidegate.engine.settings import WorkerSettings
from tidegate.ipc.protocol import ModelCard, Role, WorkerId

START_S_MAX = 180.0
STOP_S_MAX = 10.0
CONTEXT_TOKENS = 512
OUTPUT_TOKENS_MAX = 1536  # The first streams go on while the last ones are prefilled.


class Served(msgspec.Struct, frozen=True):
    """Speed of streams together, and how many positions they had, on average."""

    tokens_per_s: float
    context_tokens: int


@contextmanager
def server(
    arguments: argparse.Namespace, options: Sequence[str] = ()
) -> Generator[tuple[str, Path]]:
    """A running server with these options of `tidegate serve` beside those of `arguments`.

    What is given: its endpoint for clients, and its log.
    """
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name:
        folder = Path(name)
        log = folder / "log.jsonl"
        command = [sys.executable, "-m", "tidegate", "serve", arguments.model, "--port", "0"]
        command += ["--dtype", arguments.dtype, "--threads", str(arguments.threads)]
        command += ["--run-dir", str(folder / "run"), "--log", str(log), *options]
        process = subprocess.Popen(command, stdout=sys.stderr)
        try:
            yield f"ipc://{folder}/run/clients.sock", log
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S_MAX)


async def card_when_ready(client: AsyncClient) -> ModelCard:
    """The model's card, once a token can flow."""
    with trio.fail_after(START_S_MAX):
        # The server tells of itself only when it is asked.
        while not (await client.status()).ready:  # noqa: ASYNC110
            await trio.sleep(0.2)
    card = await client.card()
    assert card is not None
    return card


async def decode_speed(
    client: AsyncClient, prompts: Sequence[Sequence[int]], step_count: int
) -> Served:
    """All streams together, while `step_count` steps or more pass that all of them take.

    The first prompts decode while the others are prefilled; they get that many more tokens.
    """
    arrivals = Arrivals(len(prompts))
    going = set(range(len(prompts)))  # Those that have yet to take all steps.
    enough = trio.Event()

    async def read(index: int) -> None:
        generation = client.generate(
            prompts[index],
            max_tokens=OUTPUT_TOKENS_MAX,
            temperature=0,
            ignore_eos=True,
            detokenise=False,
        )
        async with generation:
            async for _ in generation:
                arrivals.note(index, time.perf_counter())
                if arrivals.steps(index) >= step_count:
                    going.discard(index)
                    if not going:
                        enough.set()

    async with trio.open_nursery() as nursery:
        for index in range(len(prompts)):
            nursery.start_soon(read, index)
        await enough.wait()
        nursery.cancel_scope.cancel()
    mean_prompt = sum(map(len, prompts)) / len(prompts)
    return Served(arrivals.tokens_per_s(), round(mean_prompt + arrivals.fed_tokens()))


def bare_loop(arguments: argparse.Namespace) -> BareLoop:
    settings = WorkerSettings(
        model=arguments.model,
        role=Role.BOTH,
        name=WorkerId("bare"),
        endpoint="",
        dtype=arguments.dtype,
        kv_memory=2**28,
        threads=arguments.threads,
    )
    engine: LoadedEngine = load_engine(settings, lambda line: print(line, file=sys.stderr))
    engine.store.close()
    return BareLoop(engine.model, engine.layout, engine.card.vocab_size)
