"""`tidegate plan`: its numbers, by hand and against the door, and its words."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.core_bench import CoreBench, D, P, hybrid, joined, submitted
from fakes.tiny_model import tiny_config
from tidegate.cli.main import main
from tidegate.cli.planning import Plan, ServerFacts, Size, make_plan
from tidegate.engine.checkpoint.config import AttentionShape
from tidegate.engine.checkpoint.rope import Rope
from tidegate.engine.settings import WorkerSettings
from tidegate.ipc.protocol import Role, WorkerId
from tidegate.kvcache.capacity import CONTEXT, Limit, PlannedWorker, Server, longest
from tidegate.kvcache.demand import Leg, Pace
from tidegate.kvcache.layout import Pages, Tokens
from tidegate.scheduler.commands import AcceptRequest, RefuseRequest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "PLANNING.md"


def make_folder(folder: Path, **changes: Any) -> Path:
    """A folder with a configuration alone, as of a hybrid model, and no weights."""
    fields = {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1_000_000,
        "sliding_window": 128,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(fields | changes))
    return folder


def run(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What the command prints."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", *options])
    captured = capsys.readouterr()
    assert not ended.value.code, captured.err
    return captured.out


def plan(capsys: pytest.CaptureFixture[str], *options: str) -> Plan:
    return msgspec.json.decode(run(capsys, *options, "--json"), type=Plan)


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *options])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def longest_of(server: ServerFacts) -> list[tuple[int, int, str, str]]:
    return [
        (each.max_tokens, each.tokens, each.limit.worker, each.limit.pool)
        for each in server.longest_prompts
    ]


def counts_of(server: ServerFacts) -> list[list[tuple[int, int]]]:
    """For each size the floors' and the targets' count of each worker."""
    return [
        [(each.floors.requests, each.targets.requests) for each in size.workers]
        for size in server.at_once
    ]


# --- Gemma 3 270M: 3 full and 15 window layers, 1 KV head of 256, window 512, bfloat16 ---


def test_gemmas_pools_are_those_that_a_hand_computes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = plan(capsys, "gemma3-270m", "--kv-memory", "1GiB")
    assert [worker.role for worker in made.workers] == ["prefill", "decode"]
    for worker in made.workers:
        full, window = worker.pools
        assert full.bytes_per_token == 3 * 2 * 256 * 2
        assert window.bytes_per_token == 15 * 2 * 256 * 2
        assert (full.window_tokens, window.window_tokens) == (None, 512)
        # 32 rows of 35 pages, a chunk of 65, and a quarter on top; the rest is the full pool's.
        assert window.page_count == (32 * 35 + 65) * 5 // 4 == 1481
        assert full.page_count == (2**30 - 1481 * 16 * 15_360) // (16 * 3072) == 14_440
        assert (full.token_count, window.token_count) == (231_040, 23_696)
        assert window.byte_count == 1481 * 16 * 15_360
        assert worker.swa_only_transfer is True
        assert worker.warnings == ()
    # The embedding, 18 layers, and norms in float32.
    matrices = 262_144 * 640 + 18 * (2 * 640 * 1024 + 2 * 640 * 256 + 3 * 640 * 2048)
    norms = 18 * (4 * 640 + 2 * 256) + 640
    assert made.weight_bytes == 2 * matrices + 4 * norms


def test_gemma_beside_a_window_cap_and_a_full_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = "1000+200,8000+500,30000+1000,32767+1,32768+1"
    made = plan(capsys, "gemma3-270m", "--kv-memory", "1GiB", "--lengths", sizes)
    ours, capped, full = made.servers
    assert longest_of(ours) == [(1, 32_768, "", "context"), (1024, 31_745, "", "context")]
    assert longest_of(capped) == [
        (1, 23_696, "prefill", "window"),
        (1024, 23_696, "prefill", "window"),
    ]
    # 18 layers of 1,024 bytes: 3,640 pages of 16, 58,240 tokens.
    assert longest_of(full) == longest_of(ours)
    assert "18,432 bytes a token" in full.assumption and "58,240 tokens" in full.assumption
    assert "23,696 tokens" in capped.assumption
    # Full pages: 63 and 75, 500 and 532, 1,875 and 1,938, 2,048. Window pages: 33 and 35.
    assert counts_of(ours) == [
        [(32, 32), (32, 32)],
        [(28, 28), (27, 27)],
        [(7, 7), (7, 7)],
        [(7, 7)],
        [(7, 7)],
    ]
    assert counts_of(capped) == [[(32, 32), (32, 32)], [(28, 28), (27, 27)], [], [], []]
    assert counts_of(full) == [
        [(32, 32), (32, 32)],
        [(7, 7), (6, 6)],
        [(1, 1), (1, 1)],
        [(1, 1)],
        [(1, 1)],
    ]
    assert capped.at_once[2].refused_by == Limit("prefill", "window")


def test_a_model_without_window_layers_has_one_pool_and_no_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("smollm2-135m", "--kv-memory", "64MiB", "--lengths", "1000+200")
    made = plan(capsys, *options)
    ours, capped, full = made.servers
    for worker in made.workers:
        (pool,) = worker.pools
        # 30 layers of 3 KV heads of 64.
        assert pool.bytes_per_token == 30 * 2 * 3 * 64 * 2
        assert pool.page_count == 64 * 2**20 // (16 * 23_040) == 182
        assert worker.swa_only_transfer is None
    assert longest_of(ours) == [(1, 2912, "prefill", "full"), (1024, 1889, "decode", "full")]
    assert counts_of(ours) == [[(2, 2), (2, 2)]]
    for other in (capped, full):
        assert longest_of(other) == longest_of(ours)
        assert counts_of(other) == counts_of(ours)
    text = run(capsys, *options)
    assert "does not apply: no layer has a window" in text
    assert "there is nothing to compare" in text
    assert "a full cache for every layer" not in text


# --- A full pool of 212,224 tokens, a window pool of 20,992, pages of 256, W 128 ---

KNOWN = (
    *("--full-pool-tokens", "212224", "--window-pool-tokens", "20992"),
    *("--page-tokens", "256", "--max-tokens", "2", "--lengths", "100+2"),
)


def test_the_full_pool_alone_bounds_a_prompt_if_the_flag_is_true(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan(capsys, str(make_folder(tmp_path)), *KNOWN)
    ours, capped, _ = made.servers
    assert longest_of(ours) == [
        (1, 212_224, "prefill", "full"),
        (2, 212_223, "decode", "full"),
    ]
    assert longest_of(capped) == [
        (1, 20_992, "prefill", "window"),
        (2, 20_992, "prefill", "window"),
    ]
    assert made.kv_memory is None


def test_the_window_pool_bounds_a_hand_off_if_the_flag_is_false(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_folder(tmp_path))
    made = plan(capsys, folder, *KNOWN, "--swa-only-transfer", "false")
    assert longest_of(made.servers[0]) == [
        (1, 212_224, "prefill", "full"),
        (2, 20_992, "prefill", "window"),
    ]
    assert [worker.swa_only_transfer for worker in made.workers] == [False, False]
    assert "forced by --swa-only-transfer" in made.workers[0].reason
    assert "the flag is false" in made.servers[0].assumption
    # Fixed pools: the full cache gets as many bytes as they take.
    taken = sum(pool.byte_count for pool in made.workers[0].pools)
    held = taken // (256 * 6 * 2 * 32 * 2) * 256
    assert longest_of(made.servers[2])[0][:2] == (1, held)


MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "sliding_window": 100}


def test_without_a_full_pool_the_context_alone_bounds_a_prompt_if_the_flag_is_true(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_folder(tmp_path, **MISTRAL))
    options = ("--window-pool-tokens", "4096", "--max-tokens", "2", "--lengths", "100+2")
    made = plan(capsys, folder, *options)
    ours, capped, full = made.servers
    assert [[pool.name for pool in worker.pools] for worker in made.workers] == [["window"]] * 2
    assert longest_of(ours) == [(1, 1_000_000, "", CONTEXT), (2, 999_999, "", CONTEXT)]
    assert longest_of(capped) == [
        (1, 4096, "prefill", "window"),
        (2, 4096, "prefill", "window"),
    ]
    assert [each[1] for each in longest_of(full)] == [4096, 4095]
    assert [worker.swa_only_transfer for worker in made.workers] == [True, True]
    assert "there is no full pool: the model's context alone bounds" in ours.assumption


def test_without_a_full_pool_the_window_pool_bounds_a_hand_off_if_the_flag_is_false(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_folder(tmp_path, **MISTRAL))
    options = ("--window-pool-tokens", "4096", "--max-tokens", "2", "--lengths", "100+2")
    made = plan(capsys, folder, *options, "--swa-only-transfer", "false")
    assert longest_of(made.servers[0]) == [
        (1, 1_000_000, "", CONTEXT),
        (2, 4096, "prefill", "window"),
    ]
    assert "bounded by the window pool: the flag is false" in made.servers[0].assumption
    error = refusal(capsys, folder, "--full-pool-tokens", "4096")
    assert "--full-pool-tokens: " in error and "has window layers only" in error


def test_without_a_hand_off_the_flag_does_not_apply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_folder(tmp_path))
    made = plan(capsys, folder, *KNOWN, "--swa-only-transfer", "false", "--role-both")
    (worker,) = made.workers
    assert (worker.role, worker.swa_only_transfer) == ("both", None)
    assert longest_of(made.servers[0]) == [
        (1, 212_224, "both", "full"),
        (2, 212_223, "both", "full"),
    ]
    assert "never refuses" in made.servers[0].assumption


# --- Against the door ---

LEGS = {"prefill": (Leg.SOURCE, Leg.WHOLE), "decode": (Leg.TARGET,)}


@given(
    source=st.tuples(st.integers(1, 30), st.integers(1, 8)),
    target=st.tuples(st.integers(1, 30), st.integers(1, 8)),
    output=st.integers(1, 30),
    context=st.integers(31, 120),
    flag=st.booleans(),
)
def test_the_door_accepts_what_the_plan_calls_the_longest_prompt_and_no_more(
    source: tuple[int, int],
    target: tuple[int, int],
    output: int,
    context: int,
    flag: bool,
) -> None:
    layout = hybrid(flag=flag)
    planned = Server(
        layout=layout,
        workers=tuple(
            PlannedWorker(role, LEGS[role], (Pages(counts[0]), Pages(counts[1])))
            for role, counts in (("prefill", source), ("decode", target))
        ),
        context=Tokens(context),
        row_count=4,
        pace=Pace(Tokens(8), 1, Tokens(4)),
    )
    best = longest(planned, Tokens(output))

    def answer(prompt: int) -> AcceptRequest | RefuseRequest:
        bench = CoreBench(
            joined(P, Role.PREFILL, source, layout, context=context),
            joined(D, Role.DECODE, target, layout, context=context),
        )
        commands = bench.turn(submitted("r", prompt, output))
        (one,) = [c for c in commands if isinstance(c, AcceptRequest | RefuseRequest)]
        return one

    if best.tokens:
        assert isinstance(answer(best.tokens), AcceptRequest)
    refused = answer(best.tokens + 1)
    assert isinstance(refused, RefuseRequest)
    assert (refused.role, refused.pool) == (best.limit.worker, best.limit.pool)


# --- Options ---


def test_what_is_missing_or_wrong_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_folder(tmp_path))
    assert "give --kv-memory or --full-pool-tokens" in refusal(capsys, folder)
    small = refusal(capsys, folder, "--kv-memory", "1KiB")
    assert "--kv-memory: 1024 bytes do not hold one request: give at least" in small
    window = refusal(capsys, folder, "--full-pool-tokens", "1000", "--window-pool-tokens", "64")
    assert "--window-pool-tokens: 64 tokens are 4 pages" in window
    page = refusal(capsys, folder, "--full-pool-tokens", "10")
    assert "--full-pool-tokens: must be one page at least, which is 16 tokens" in page
    assert "is neither a .gguf file nor a folder" in refusal(capsys, __file__)
    assert "such as 1000+200" in refusal(capsys, folder, "--lengths", "1000")
    assert "1 to 4096" in refusal(capsys, folder, "--page-tokens", "0")


def test_a_model_without_window_layers_takes_no_option_about_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_folder(tmp_path, layer_types=["full_attention"] * 6))
    for option in (("--swa-only-transfer", "false"), ("--window-pool-tokens", "4096")):
        error = refusal(capsys, folder, "--kv-memory", "1GiB", *option)
        assert f"{option[0]}: " in error and "has no window layers" in error


def test_sizes_are_chosen_by_the_models_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for context, sizes in (
        (1_000_000, [Size(1000, 200), Size(8000, 500), Size(30_000, 1000)]),
        (8192, [Size(1000, 200)]),
        (100, [Size(50, 25)]),
        (1, [Size(1, 1)]),
    ):
        folder = str(make_folder(tmp_path, max_position_embeddings=context))
        made = plan(capsys, folder, "--kv-memory", "1GiB")
        assert [each.size for each in made.servers[0].at_once] == sizes


def test_a_memory_that_holds_no_full_cache_at_all_is_no_error() -> None:
    # A token takes 32 KiB in the full layer, and 32 in each of the two window layers.
    wide = AttentionShape(head_count=2, kv_head_count=1, key_size=8192, value_size=8192)
    rope = Rope(theta=1e4, size=8192)
    config = msgspec.structs.replace(
        tiny_config("gemma3"), attention=wide, rope=rope, rope_window=rope, window=1
    )
    workers = [
        WorkerSettings(
            model="",
            role=role,
            name=WorkerId(role.value),
            endpoint="",
            page_tokens=1,
            kv_memory=128 * 1024,
        )
        for role in (Role.PREFILL, Role.DECODE)
    ]
    made = make_plan(config, workers, [1], [Size(1, 1)])
    ours, _, full = made.servers
    assert [pool.token_count for pool in made.workers[0].pools] == [2, 1]
    assert longest_of(ours) == [(1, 2, "prefill", "full")]
    assert longest_of(full) == [(1, 0, "prefill", "full")]
    assert full.at_once[0].refused_by == Limit("prefill", "full")
    assert "(0 tokens)" in full.assumption


# --- Words, and what is loaded ---


def test_the_document_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = 0
    for block in DOCUMENT.read_text().split("```")[1::2]:
        command, _, output = block.strip("\n").removeprefix("console\n").partition("\n")
        if not command.startswith("$ tidegate "):
            continue
        with pytest.raises(SystemExit):
            main(shlex.split(command)[2:])
        assert capsys.readouterr().out.strip() == output.strip()
        shown += 1
    assert shown >= 2


def test_a_plan_loads_no_weights_and_no_torch(tmp_path: Path) -> None:
    arguments = ["plan", str(make_folder(tmp_path)), "--kv-memory", "1GiB"]
    script = (
        "import sys\n"
        "from tidegate.cli.main import build_parser\n"
        f"arguments = build_parser().parse_args({arguments!r})\n"
        "assert arguments.run(arguments) == 0\n"
        "print(sorted({'torch', 'trio', 'zmq'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_limit_of_a_context_names_no_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_folder(tmp_path, max_position_embeddings=4096))
    made = plan(capsys, folder, "--kv-memory", "1GiB", "--lengths", "4096+2")
    assert made.servers[0].at_once[0].refused_by == Limit("", CONTEXT)
    assert "context" in run(capsys, folder, "--kv-memory", "1GiB", "--lengths", "4096+2")
