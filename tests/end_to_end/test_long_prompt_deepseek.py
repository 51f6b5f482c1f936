"""100,000 tokens on a DeepSeek V4 model: the full pool of compressed entries bounds a prompt,
and a few windows' worth of keys is enough.
"""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from end_to_end.serving import Server, serve
from oracle.make_tiny_checkpoint import make_tiny_checkpoint
from tidegate import AsyncClient
from tidegate.clients.library import RequestRefused

PROMPT_TOKENS = 100_000
OUTPUT_TOKENS = 24
WINDOW = 128
PEAK_MIB_MAX = 4096  # Of a worker.
# With the flag true and false: the same memory.
OPTIONS = (
    *("--dtype", "float32"),
    *("--page-tokens", "16"),
    *("--chunk-tokens", "512"),
    *("--full-pool-tokens", "100096"),
    *("--kv-memory", "32MiB"),
    *("--max-running", "4"),
    # A chunk late in the prompt looks through 25,000 entries for each of its tokens.
    *("--stall-timeout", "120"),
)


@dataclass
class Run:
    tokens: tuple[int, ...] = ()
    refusal: RequestRefused | None = None
    handoffs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    summaries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    pools: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    peaks_mib: dict[str, float] = field(default_factory=dict[str, float])
    story: list[str] = field(default_factory=list[str])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("deepseek") / "tiny-deepseek",
        "deepseek_v4",
        max_position_embeddings=131_072,
        sliding_window=WINDOW,
        compress_rates={
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 128,
        },
        index_n_heads=8,
        index_topk=64,
    )


def peak_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no peak in /proc")


def story_of(server: Server) -> list[str]:
    """The lines that `tidegate logs story` prints of the one request."""
    (received,) = server.lines("request_received")
    command = [sys.executable, "-m", "tidegate", "logs", "story", received["request_id"]]
    done = subprocess.run(
        [*command, str(server.log)], capture_output=True, text=True, check=True, timeout=60
    )
    return [line.strip() for line in done.stdout.splitlines()]


def line_with(story: list[str], text: str) -> str:
    (line,) = (line for line in story if text in line)
    return line


def serve_once(folder: Path, *options: str) -> Run:
    run = Run()
    prompt = [0] + [7 + index * index % 97 for index in range(PROMPT_TOKENS - 1)]

    async def ask(server: Server) -> None:
        async with AsyncClient(server.endpoint) as client:
            try:
                result = await client.complete(
                    prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenise=False
                )
                run.tokens = result.token_ids
            except RequestRefused as refusal:
                run.refusal = refusal

    with serve(str(folder), *OPTIONS, *options) as server:
        trio.run(ask, server)
        assert not server.lines("row_fault")
        run.handoffs = server.lines("handoff_done")
        run.summaries = server.lines("request_finished")
        run.pools = {pool["pool"]: pool for pool in server.health()["pools"]}
        run.peaks_mib = {
            name: peak_mib(pid)
            for name, pid in server.pids().items()
            if name.startswith(("prefill", "decode", "both"))
        }
        server.wait_until_all_pages_are_free()
        run.story = story_of(server)
    return run


@pytest.mark.slow
def test_the_full_pool_bounds_a_prompt_and_with_the_flag_false_the_window_pool_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apart = serve_once(folder)
    together = serve_once(folder, "--role-both")
    forced = serve_once(folder, "--swa-only-transfer", "false")
    assert len(apart.tokens) == OUTPUT_TOKENS
    assert len(set(apart.tokens)) > 3
    assert apart.tokens == together.tokens
    assert together.handoffs == []
    (handoff,), (summary,) = apart.handoffs, apart.summaries
    # All entries, the window, of stretches of 4 and of 128 tokens those that are left, and what
    # the last complete stretch of 4 leaves to the next entry.
    page_counts = {
        "full": -(-PROMPT_TOKENS // 128),
        "window": 8,
        "csa_tail": PROMPT_TOKENS % 4,
        "csa_overlap": 1,
        "hca_tail": PROMPT_TOKENS % 128 // 16,
    }
    moved = sum(count * apart.pools[name]["page_bytes"] for name, count in page_counts.items())
    window = apart.pools["window"]
    assert handoff["bytes_moved"] == moved
    saved = (PROMPT_TOKENS // 16 - page_counts["window"]) * window["page_bytes"]
    assert handoff["bytes_saved"] == saved
    assert window["page_count"] * 16 < PROMPT_TOKENS // 10
    assert forced.refusal is not None
    assert (forced.refusal.status, forced.refusal.pool) == (400, "window")
    assert forced.refusal.needed is not None
    assert forced.refusal.needed >= PROMPT_TOKENS // 16
    moving, refusing = "handoff_done", "Refused with 400"
    assert f"bytes_moved={moved} bytes_saved={saved}" in line_with(apart.story, moving)
    assert "of the window pool" in line_with(forced.story, refusing)
    peaks = [peak for run in (apart, together) for peak in run.peaks_mib.values()]
    assert len(peaks) == 3
    assert max(peaks) < PEAK_MIB_MAX
    with capsys.disabled():
        print(f"\n{PROMPT_TOKENS} tokens, a window of {WINDOW}, 32 MiB of pages a worker:")
        print(
            f"  swa_only_transfer true: {moved / 2**20:.1f} MiB moved, "
            f"{saved / 2**20:.1f} MiB saved, {window['page_count']} window pages, prefill "
            f"{summary['prefill_us'] / 1e6:.0f} s, peaks {apart.peaks_mib} MiB"
        )
        print(f"    {line_with(apart.story, 'request_accepted')}")
        print(f"    {line_with(apart.story, moving)}")
        print("  swa_only_transfer false:")
        print(f"    {line_with(forced.story, refusing)}")
