"""`tidegate inspect`: layouts by hand, figures that other parts confirm, words and errors."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oracle.make_tiny_checkpoint import make_tiny_checkpoint
from oracle.make_tiny_gguf import make_tiny_gguf
from tidegate.cli.inspection import CapRefusal, Inspection
from tidegate.cli.main import main
from tidegate.cli.planning import Plan

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "INSPECTING.md"
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2
    + ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "sliding_window": 100,
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 4096,
    "max_position_embeddings": 32_768,
    "eos_token_id": 2,
}


def make_folder(folder: Path, fields: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def run(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What the command prints."""
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *options])
    captured = capsys.readouterr()
    assert not ended.value.code, captured.err
    return captured.out


def words(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The same in one line, with single spaces."""
    return " ".join(run(capsys, *options).split())


def inspection(capsys: pytest.CaptureFixture[str], *options: str) -> Inspection:
    return msgspec.json.decode(run(capsys, *options, "--json"), type=Inspection)


def test_groups_of_a_model_with_shared_keys_are_those_that_a_hand_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, GEMMA4)
    found = inspection(capsys, folder, "--page-tokens", "8")
    full, window = found.groups
    assert (full.pool, full.reach, full.layers) == ("full", "all", (2, 5))
    assert (window.pool, window.reach, window.layers) == ("window", "window", (0, 1, 3, 4))
    assert found.layers_without_kv == (6, 7)
    assert (full.window_tokens, window.window_tokens, found.window_tokens) == (None, 100, 100)
    assert [(each.kind, each.shape) for each in full.tensors] == [
        ("keys", (1, 32)),
        ("values", (1, 32)),
    ]
    assert [(each.kind, each.shape) for each in window.tensors] == [
        ("keys", (2, 16)),
        ("values", (2, 16)),
    ]
    assert full.bytes_per_token == 2 * 2 * 32 * 2
    assert window.bytes_per_token == 4 * 2 * 2 * 16 * 2
    assert (full.page_bytes, window.page_bytes) == (8 * 256, 8 * 512)
    assert (found.swa_only_transfer, found.has_weights, found.plan) == (True, False, None)
    text = words(capsys, folder, "--page-tokens", "8")
    assert "Pool window has layers 0-1, 3-4." in text
    assert "nothing kept, by 2 layers: 6-7." in text
    assert "itself and 99 before keys 2 x 16, values 2 x 16 512 4,096" in text
    assert "a configuration without weights" in text
    assert "With --kv-memory SIZE" in text
    assert (full.kept_bytes_max, window.kept_bytes_max) == (None, 99 * 512)
    assert window.kept_page_bytes_max == 14 * 4096
    assert "Beside pool full, later tokens read at most 49.5 KiB of a request" in text
    assert "50,688 bytes. In whole pages, with the token that is fed" in text


def test_the_bytes_of_a_hand_off_are_those_of_the_pages_it_moves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, GEMMA4)
    found = inspection(capsys, folder, "--page-tokens", "8")
    assert [each.prompt for each in found.handoffs] == [1000, 8000, 30_000, 131_071]
    for each in found.handoffs:
        pages = -(-each.prompt // 8)
        # A query at L reads L - 99 and what follows.
        moved = (each.prompt - 1) // 8 - (each.prompt - 99) // 8 + 1
        assert each.bytes_as_declared == pages * 2048 + moved * 4096
        assert each.bytes_if_false == pages * (2048 + 4096)
    assert "3.0 times" in run(capsys, folder, "--page-tokens", "8")


def test_with_a_memory_it_tells_the_plan_and_what_a_cap_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, GEMMA4)
    options = (folder, "--kv-memory", "16MiB", "--max-running", "4", "--max-tokens", "100")
    found = inspection(capsys, *options)
    with pytest.raises(SystemExit):
        main(["plan", *options, "--json"])
    plan = msgspec.json.decode(capsys.readouterr().out, type=Plan)
    assert found.plan is not None
    assert found.plan.workers == plan.workers
    for mine, theirs in zip(found.plan.servers, plan.servers, strict=True):
        assert mine.longest_prompts == theirs.longest_prompts
    full, window = plan.workers[0].pools
    ours = min(full.token_count, 131_072)
    assert window.token_count < ours
    assert [(each.max_tokens, each.shortest) for each in found.refused_by_window_cap] == [
        (1, window.token_count + 1),
        (100, window.token_count + 1),
    ]
    assert found.refused_by_window_cap[0].longest == ours
    text = words(capsys, *options)
    assert f"would refuse prompts of {window.token_count + 1:,} to {ours:,} tokens" in text
    assert f"prefill full all positions 256 {full.token_count:,}" in text


def test_a_forced_flag_is_told_beside_the_declared_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (make_folder(tmp_path, GEMMA4), "--kv-memory", "16MiB")
    forced = (*options, "--swa-only-transfer", "false")
    found = inspection(capsys, *forced)
    assert found.swa_only_transfer is True and found.plan is not None
    assert [worker.swa_only_transfer for worker in found.plan.workers] == [False, False]
    assert found.refused_by_window_cap == ()
    text = words(capsys, *forced)
    assert "swa_only_transfer is true: a window layer reads" in text
    assert "swa_only_transfer on prefill and decode is false: forced by" in text
    assert "would refuse nothing that runs here" in text
    assert "swa_only_transfer on prefill" not in words(capsys, *options)
    both = words(capsys, *options, "--role-both")
    assert "does not apply: a worker of role both hands nothing over" in both


def test_a_model_of_windows_alone_has_no_full_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (make_folder(tmp_path, MISTRAL), "--window-pool-tokens", "8192")
    found = inspection(capsys, *options)
    assert [(each.pool, each.layers) for each in found.groups] == [("window", (0, 1))]
    assert found.refused_by_window_cap == (
        CapRefusal(1, 8193, 32_768),
        CapRefusal(1024, 8193, 31_745),
    )


def test_a_model_without_windows_has_nothing_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, MISTRAL | {"sliding_window": None})
    found = inspection(capsys, folder, "--kv-memory", "64MiB")
    assert (found.swa_only_transfer, found.window_tokens) == (None, None)
    assert found.handoffs[0].bytes_if_false is None
    text = words(capsys, folder, "--kv-memory", "64MiB")
    assert "swa_only_transfer does not apply: no layer has a window" in text
    assert "capped by" not in text
    assert "a hand-off moves 1,000 tokens" in text and "times" not in text


def test_a_context_of_a_few_tokens_is_told_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for context, prompts in ((1, []), (2, [1]), (1002, [1000, 1001])):
        folder = make_folder(tmp_path, GEMMA4 | {"max_position_embeddings": context})
        found = inspection(capsys, folder)
        assert [each.prompt for each in found.handoffs] == prompts
        text = words(capsys, folder)
        assert f"context {context:,} tokens" in text
        assert ("a hand-off moves" in text) == bool(prompts)


def test_a_whole_folder_and_a_gguf_file_of_it_have_the_same_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "gemma3")
    path = make_tiny_gguf(tmp_path / "tiny.gguf", folder)
    found = [inspection(capsys, str(each)) for each in (folder, path)]
    assert found[0].has_weights and found[1].has_weights
    assert found[0].groups == found[1].groups
    assert "without weights" not in run(capsys, str(folder))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("nothing-here",), "nothing-here is not a model's name, and no such file exists"),
        (("{folder}/empty",), "has no config.json"),
        (("{folder}/notes.txt",), "is neither a .gguf file nor a folder"),
        (("{folder}/strange",), "architectures is GPT2LMHeadModel: supported are"),
        (("{folder}/broken",), "config.json"),
        (("{folder}", "--page-tokens", "0"), "--page-tokens"),
        (("{folder}", "--kv-memory", "1KiB"), "--kv-memory"),
        (("{folder}", "--full-pool-tokens", "4"), "--full-pool-tokens: must be one page"),
        (("{folder}", "--window-pool-tokens", "4096"), "give --kv-memory"),
        ((), "FOLDER"),
    ],
)
def test_what_cannot_be_inspected_is_told_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    named: str,
) -> None:
    make_folder(tmp_path, GEMMA4)
    for name in ("empty", "strange", "broken"):
        (tmp_path / name).mkdir()
    make_folder(tmp_path / "strange", {"architectures": ["GPT2LMHeadModel"]})
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *(option.format(folder=tmp_path) for option in options)])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert named in captured.err


def test_the_document_shows_what_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = DOCUMENT.read_text().split("```")[1::2]
    configs = [block for block in blocks if block.startswith("json\n")]
    for model, config in zip(("MiMo-V2-Flash", "DeepSeek-V4"), configs, strict=True):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text(config.removeprefix("json\n"))
    shown = [block for block in blocks if block.startswith("console\n")]
    assert len(shown) == 4
    for block in shown:
        command, _, output = block.removeprefix("console\n$ tidegate ").partition("\n")
        with pytest.raises(SystemExit):
            main(shlex.split(command))
        assert capsys.readouterr().out.strip() == output.strip()


def test_how_a_file_of_mistral_is_read_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    assert inspection(capsys, str(folder)).notes == ()
    fields = {"general.name": "Mistral-7B-v0.1"}
    path = make_tiny_gguf(tmp_path / "mistral.gguf", folder, fields=fields)
    (note,) = inspection(capsys, str(path)).notes
    assert f"note: {note}" in words(capsys, str(path))
    assert "do not tell of a window" in note


def test_an_inspection_loads_no_weights_and_no_torch(tmp_path: Path) -> None:
    arguments = ["inspect", make_folder(tmp_path, GEMMA4), "--kv-memory", "1GiB"]
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


def test_tails_and_compressed_entries_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"architectures": ["DeepseekV4ForCausalLM"], "eos_token_id": 1}
    folder = make_folder(tmp_path, fields)
    found = inspection(capsys, folder, "--kv-memory", "8GiB", "--page-tokens", "128")
    tails = [group for group in found.groups if group.reach == "tail"]
    assert len(tails) == 3 and all(group.window_tokens is None for group in tails)
    (full,) = (group for group in found.groups if group.reach == "all")
    assert (full.bytes_per_token, full.kept_bytes_max, full.kept_page_bytes_max) == (
        6584,
        None,
        None,
    )
    kept = {group.pool: group.kept_bytes_max for group in found.groups if group is not full}
    assert kept == {
        "window": 5_592_064,
        "csa_tail": 307_200,
        "csa_overlap": 307_200,
        "hca_tail": 5_982_208,
    }
    # Two pages of the window, a page of each tail, and of the overlap the open stretch's too.
    pages = {group.pool: group.kept_page_bytes_max for group in found.groups}
    assert pages == {
        "full": None,
        "window": 2 * 43 * 128 * 1024,
        "csa_tail": 20 * 4 * 640 * 8,
        "csa_overlap": 2 * 20 * 4 * 640 * 6,
        "hca_tail": 23 * 128 * 512 * 4,
    }
    text = words(capsys, folder, "--kv-memory", "8GiB", "--page-tokens", "128")
    assert "its stretch of 4 and 1 before" in text
    assert "entries 512 for each 4 tokens (20 layers)" in text
    assert "float32" in text
    assert "Beside pool full, later tokens read at most 11.6 MiB of a request" in text
    assert "12,188,672 bytes (5,592,064 of window, 307,200 of csa_tail" in text
    assert "prefill hca_tail tail of 128 47,104" in text
    assert "prefill csa_tail tail of 4" in text
    assert "prefill csa_overlap tail of 2 x 4" in text
