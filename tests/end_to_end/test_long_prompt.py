"""A prompt of 100,000 tokens on a hybrid model whose window pool holds a few windows."""

from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import pytest
import trio

from end_to_end.serving import Server, serve
from oracle.make_tiny_checkpoint import VOCAB_SIZE, make_tiny_checkpoint
from tidegate import AsyncClient
from tidegate.clients.library import RequestRefused

PROMPT_TOKENS = 100_000
WINDOW = 512
WINDOW_POOL_TOKENS = 4096
PAGE_TOKENS = 16
CHUNK_TOKENS = 512
OUTPUT_TOKENS = 24
OPTIONS = (
    *("--dtype", "float32"),
    *("--page-tokens", str(PAGE_TOKENS)),
    *("--chunk-tokens", str(CHUNK_TOKENS)),
    *("--full-pool-tokens", "100096"),
    *("--max-running", "4"),
)
WORKERS = ("prefill-0", "decode-0")
# Of each worker, from the first chunks to the end. What grows are the buffers that launches
# keep (80 MiB of scores, and the keys and values of one full-attention layer), and the pools'
# pages that were not used before: pools are mapped when the worker starts.
GROWTH_MIB_MAX = 128
SAMPLE_S = 0.25


@dataclass
class Run:
    tokens: tuple[int, ...]
    summary: dict[str, int]  # The line `request_finished`.
    window_page_bytes: int
    resident_mib: dict[str, list[float]]  # Of each worker, now and then.
    window_pages_used: list[int]  # Of the prefill worker.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("gemma4") / "tiny-gemma4",
        "gemma4",
        max_position_embeddings=131_072,
        sliding_window=WINDOW,
    )


def prompt() -> list[int]:
    return [2] + [7 + index * index % 97 for index in range(PROMPT_TOKENS - 1)]


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def watch(server: Server, run: Run, end: Event) -> None:
    """Note the workers' memory and the prefill worker's window pages in use until `end`."""
    pids = server.pids()
    while not end.wait(SAMPLE_S):
        for worker in WORKERS:
            run.resident_mib[worker].append(resident_mib(pids[worker]))
        for pool in server.health()["pools"]:
            if (pool["worker"], pool["pool"]) == ("prefill-0", "window"):
                run.window_page_bytes = pool["page_bytes"]
                run.window_pages_used.append(pool["page_count"] - pool["free_count"])


def serve_once(folder: Path, *options: str) -> Run:
    run = Run((), {}, 0, {worker: [] for worker in WORKERS}, [])
    with serve(str(folder), *OPTIONS, *options) as server:

        async def ask() -> None:
            async with AsyncClient(server.endpoint) as client:
                result = await client.complete(
                    prompt(), max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenise=False
                )
                run.tokens = result.token_ids

        end = Event()
        watcher = Thread(target=watch, args=(server, run, end))
        watcher.start()
        try:
            trio.run(ask)
        finally:
            end.set()
            watcher.join()
        assert not server.lines("row_fault")
        run.summary = server.lines("request_finished")[-1]
        server.wait_until_all_pages_are_free()
    return run


@pytest.mark.slow
def test_a_prompt_far_longer_than_the_window_pool_runs_in_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = serve_once(folder, "--window-pool-tokens", str(WINDOW_POOL_TOKENS))
    whole = serve_once(folder, "--window-pool-tokens", "100096", "--swa-only-transfer", "false")
    assert len(small.tokens) == OUTPUT_TOKENS
    assert max(small.tokens) < VOCAB_SIZE
    assert small.tokens == whole.tokens
    pool_pages = WINDOW_POOL_TOKENS // PAGE_TOKENS
    peak = small.summary["pages_window_peak"]
    assert WINDOW // PAGE_TOKENS < peak <= pool_pages
    assert max(small.window_pages_used) <= pool_pages
    # The last pages of the window, and no more, are moved; of the other model all.
    page_count = PROMPT_TOKENS // PAGE_TOKENS
    left = page_count - WINDOW // PAGE_TOKENS
    assert whole.summary["bytes_saved"] == 0
    assert whole.summary["pages_window_peak"] >= page_count
    saved = whole.summary["bytes_moved"] - small.summary["bytes_moved"]
    assert saved == small.summary["bytes_saved"] == left * small.window_page_bytes
    for worker in WORKERS:
        early, *_, late = small.resident_mib[worker][4:]
        assert late - early <= GROWTH_MIB_MAX, (worker, small.resident_mib)
    with capsys.disabled():
        print(f"\n{PROMPT_TOKENS} tokens, a window of {WINDOW}:")
        for flag, run in (("true", small), ("false", whole)):
            memory = ", ".join(
                f"{worker} {mib[4]:.0f} to {mib[-1]:.0f} MiB"
                for worker, mib in run.resident_mib.items()
            )
            print(
                f"  swa_only_transfer {flag}: "
                f"{run.summary['bytes_moved'] / 2**20:.1f} MiB moved, "
                f"{run.summary['pages_window_peak']} window pages at most, prefill "
                f"{run.summary['prefill_us'] / 1e6:.1f} s; {memory}"
            )
        ratio = whole.summary["bytes_moved"] / small.summary["bytes_moved"]
        moved = page_count - left
        print(
            f"  true moves {ratio:.1f} times less, of the window layers "
            f"{page_count / moved:.0f} times less"
        )


@pytest.mark.slow
def test_with_the_flag_false_such_a_window_pool_refuses_it(folder: Path) -> None:
    small = ("--window-pool-tokens", str(WINDOW_POOL_TOKENS), "--swa-only-transfer", "false")
    with serve(str(folder), *OPTIONS, *small) as server:

        async def ask() -> None:
            async with AsyncClient(server.endpoint) as client:
                with pytest.raises(RequestRefused) as caught:
                    await client.complete(prompt(), max_tokens=OUTPUT_TOKENS)
                assert (caught.value.pool, caught.value.needed) == (
                    "window",
                    PROMPT_TOKENS // PAGE_TOKENS,
                )

        trio.run(ask)
