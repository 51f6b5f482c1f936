"""What `load_engine` gives for a tiny checkpoint, and what it says on the way."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from oracle.make_tiny_checkpoint import make_tiny_checkpoint
from oracle.make_tiny_gguf import make_tiny_gguf
from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.engine.loading import LoadedEngine, load_engine
from tidegate.engine.pools import workspace_bytes
from tidegate.engine.settings import WorkerSettings
from tidegate.ipc.protocol import Role, WorkerId
from tidegate.kvcache.demand import Leg
from tidegate.kvcache.layout import LayoutError, Tokens
from tidegate.kvcache.sizer import longest_prompt


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("hybrid"), "gemma3")


def settings_of(model: Path, **changes: Any) -> WorkerSettings:
    settings = WorkerSettings(
        model=str(model),
        role=Role.PREFILL,
        name=WorkerId("w"),
        endpoint="",
        dtype="float32",
        page_tokens=8,
        kv_memory=64 * 2**20,
        max_running=4,
    )
    return msgspec.structs.replace(settings, **changes)


def load(model: Path, **changes: Any) -> tuple[LoadedEngine, list[str]]:
    said: list[str] = []
    return load_engine(settings_of(model, **changes), said.append), said


def test_pools_fill_the_memory_and_the_store_has_their_sizes(hybrid: Path) -> None:
    engine, said = load(hybrid)
    assert 63 * 2**20 < engine.store.geometry.byte_count <= 64 * 2**20
    assert engine.store.geometry.page_counts == engine.pools.page_counts
    assert "gemma3 family" in said[0]
    assert said[-1].startswith("loaded in")
    assert not any(line.startswith("warning") for line in said)


def test_a_model_keeps_its_flag_unless_it_is_forced_to_false(hybrid: Path) -> None:
    engine, _ = load(hybrid)
    assert engine.layout.swa_only_transfer is True
    forced, _ = load(hybrid, swa_only_transfer=False, kv_memory=2**20)
    assert forced.layout.swa_only_transfer is False
    assert forced.fingerprint.layout == forced.layout
    assert forced.fingerprint != engine.fingerprint
    # Now the window pool holds whole prompts, so it bounds them as the full pool does.
    assert len(set(forced.pools.page_counts)) == 1
    longest = longest_prompt(
        forced.layout, forced.pools.page_counts, Leg.SOURCE, context=Tokens(10_000)
    )
    assert longest == 8 * forced.pools.page_counts[0]


def test_pools_that_are_small_are_warned_about(hybrid: Path) -> None:
    _, said = load(hybrid, kv_memory=2**19)
    warnings = [line for line in said if line.startswith("warning: ")]
    assert any("the window pool has" in line for line in warnings)
    assert any("prompts of up to" in line for line in warnings)


def test_that_a_file_of_mistral_tells_of_no_window_is_said(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    for name, is_said in (("Mistral 7B v0.1", True), ("Llama", False)):
        path = make_tiny_gguf(
            tmp_path / f"{name[:5]}.gguf", folder, fields={"general.name": name}
        )
        engine, said = load(path)
        assert [pool.name for pool in engine.pools.pools] == ["full"]
        notes = [line for line in said if line.startswith("note: ")]
        assert any("do not tell of a window" in note for note in notes) == is_said


def test_a_model_without_window_layers_has_no_flag_to_force(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path, "llama")
    engine, _ = load(model)
    assert [pool.name for pool in engine.pools.pools] == ["full"]
    with pytest.raises(LayoutError, match="no window layers"):
        load(model, swa_only_transfer=False)


def test_the_workspace_grows_with_what_a_launch_may_hold(hybrid: Path, tmp_path: Path) -> None:
    config = open_checkpoint(str(hybrid)).config
    small = workspace_bytes(settings_of(hybrid, chunk_tokens=64), config)
    assert small < workspace_bytes(settings_of(hybrid, chunk_tokens=512), config)
    assert small < workspace_bytes(settings_of(hybrid, chunk_tokens=64, max_running=64), config)
    # What a launch carries through all layers, for each of its tokens.
    with_inputs, without = (
        open_checkpoint(
            str(
                make_tiny_checkpoint(
                    tmp_path / str(width),
                    "gemma4",
                    hidden_size_per_layer_input=width,
                    num_kv_shared_layers=0,
                )
            )
        ).config
        for width in (16, 0)
    )
    settings = settings_of(hybrid, chunk_tokens=64)
    assert workspace_bytes(settings, without) < workspace_bytes(settings, with_inputs)
    # Without a budget a launch may hold the whole context.
    assert workspace_bytes(settings_of(hybrid, chunk_tokens=None), config) == workspace_bytes(
        settings_of(hybrid, chunk_tokens=config.context), config
    )
