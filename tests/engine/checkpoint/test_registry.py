"""What a MODEL argument may be, and the refusals of everything else."""

from pathlib import Path

import pytest

from oracle.make_tiny_checkpoint import make_tiny_checkpoint
from oracle.make_tiny_gguf import make_tiny_gguf
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.gguf_checkpoint import GgufCheckpoint
from tidegate.engine.checkpoint.hf_checkpoint import HfCheckpoint
from tidegate.engine.checkpoint.registry import open_checkpoint


def test_packaged_models_open_by_name() -> None:
    for name, family in (("gemma3-270m", "gemma3"), ("smollm2-135m", "llama")):
        checkpoint = open_checkpoint(name)
        assert isinstance(checkpoint, GgufCheckpoint)
        assert (checkpoint.config.family, checkpoint.config.name) == (family, name)


def test_a_folder_and_a_gguf_file_open_by_path_and_are_named_after_it(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "harbour", "llama")
    path = make_tiny_gguf(tmp_path / "tide.GGUF", folder)
    opened = open_checkpoint(str(folder))
    assert isinstance(opened, HfCheckpoint)
    assert opened.config.name == "harbour"
    assert open_checkpoint(f"{folder}/").config.name == "harbour"
    from_file = open_checkpoint(str(path))
    assert isinstance(from_file, GgufCheckpoint)
    assert from_file.config.name == "tide"


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_tiny_checkpoint(tmp_path / "tiny", "llama")
    assert open_checkpoint("~/tiny").config.name == "tiny"


def test_split_weights_open_too(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama", shard_bytes_max=100_000)
    assert open_checkpoint(str(folder)).config.layer_count == 4


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("absent", "is not a model's name, and no such file exists"),
        ("absent.gguf", "no such file exists"),
        ("notes.txt", "is neither a .gguf file nor a folder"),
        ("empty", "has no config.json"),
        ("unweighted", "has no model.safetensors or model.safetensors.index.json"),
    ],
)
def test_anything_else_is_refused_with_what_is_accepted(
    tmp_path: Path, name: str, fault: str
) -> None:
    (tmp_path / "notes.txt").write_text("GGUF")
    (tmp_path / "empty").mkdir()
    (tmp_path / "unweighted").mkdir()
    (tmp_path / "unweighted" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(tmp_path / name))
    message = str(caught.value)
    assert name in message
    assert fault in message
    for accepted in ("gemma3-270m", "smollm2-135m", ".gguf file", "config.json"):
        assert accepted in message


def test_a_name_in_other_words_is_refused_with_the_names() -> None:
    with pytest.raises(CheckpointError, match="gemma3-270m, smollm2-135m"):
        open_checkpoint("gemma-3-270m")
    with pytest.raises(CheckpointError, match="gemma3-270m, smollm2-135m"):
        open_checkpoint("")


def test_a_gguf_split_over_files_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    path = make_tiny_gguf(tmp_path / "tiny.gguf", folder, fields={"split.count": 2})
    checkpoint = open_checkpoint(str(path))
    with pytest.raises(CheckpointError, match=r"split\.count is 2: models split over several"):
        _ = checkpoint.config


def test_a_chat_template_file_takes_the_place_of_the_model_s_own(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    path = make_tiny_gguf(tmp_path / "tiny.gguf", folder)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }} \u00e9")
    for model in (str(folder), str(path), "smollm2-135m"):
        assert open_checkpoint(model, template).chat_template == "{{ messages }} \u00e9"
        assert open_checkpoint(model, str(template)).chat_template == "{{ messages }} \u00e9"
        assert open_checkpoint(model).chat_template != "{{ messages }} \u00e9"


def test_a_chat_template_makes_a_base_model_stop_at_the_end_of_a_turn(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    assert open_checkpoint("gemma3-270m").config.eos_ids == (1,)
    assert open_checkpoint("gemma3-270m", template).config.eos_ids == (1, 106)


def test_a_chat_template_file_that_cannot_serve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.jinja: cannot be read: No such file"):
        open_checkpoint("smollm2-135m", tmp_path / "absent.jinja")
    template = tmp_path / "template.jinja"
    template.write_text(" \n")
    with pytest.raises(CheckpointError, match=r"template\.jinja: the chat template is empty"):
        open_checkpoint("smollm2-135m", template)
    template.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"template\.jinja: is not UTF-8"):
        open_checkpoint("smollm2-135m", template)


def test_a_configuration_alone_will_do_for_whoever_needs_no_weights(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    (folder / "model.safetensors").unlink()
    assert open_checkpoint(str(folder), needs_weights=False).config.family == "llama"
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        open_checkpoint(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(str(folder), needs_weights=False)
