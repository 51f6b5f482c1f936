"""`tidegate models`: each family with its groups, bytes a token, flag and reason."""

import json
from typing import Any

import msgspec
import pytest

from tidegate.cli import models
from tidegate.cli.main import main
from tidegate.engine.checkpoint.config import FAMILIES
from tidegate.engine.checkpoint.packaged_models import PACKAGED_MODELS


def run(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["models", *options])
    assert not ended.value.code
    return capsys.readouterr().out


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(capsys, *options, "--json"))
    return {model["name"]: model for model in found}


def test_each_known_family_is_listed_with_flag_reason_window_and_groups(
    capsys: pytest.CaptureFixture[str],
) -> None:
    models: list[dict[str, Any]] = json.loads(run(capsys, "--json"))
    assert list(dict.fromkeys(model["family"] for model in models)) == list(FAMILIES)
    for model in models:
        assert model["reason"]
        assert model["groups"]
        if model["is_installed"]:
            has_window = model["window_tokens"] is not None
            assert has_window == (model["swa_only_transfer"] is not None)
    found = listed(capsys)
    gemma = found["gemma3-270m"]
    assert (gemma["family"], gemma["swa_only_transfer"]) == ("gemma3", True)
    assert gemma["window_tokens"] == 512
    assert [
        (group["pool"], group["reach"], group["layers"], group["window_tokens"])
        for group in gemma["groups"]
    ] == [("full", "all", 3, None), ("window", "window", 15, 512)]
    # Keys and values of one head of 256, in two bytes each.
    assert [group["bytes_per_token"] for group in gemma["groups"]] == [3 * 1024, 15 * 1024]
    smollm2 = found["smollm2-135m"]
    assert (smollm2["swa_only_transfer"], smollm2["window_tokens"]) == (None, None)
    assert [group["bytes_per_token"] for group in smollm2["groups"]] == [30 * 2 * 3 * 64 * 2]


def test_the_number_format_changes_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, "gemma3-270m", "--dtype", "float32")
    assert [each["bytes_per_token"] for each in found["gemma3-270m"]["groups"]] == [
        6 * 1024,
        30 * 1024,
    ]


def test_the_text_tells_the_family_in_general_and_its_models_in_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = " ".join(run(capsys).split())
    assert "gemma3 family" in text and "llama family" in text
    assert "swa_only_transfer: true (a window layer reads" in text
    assert "swa_only_transfer: not applicable (no layer has a window" in text
    assert "2 x KV heads x head size x bytes of an element" in text
    assert "15 layers that read a window of 512, 15.0 KiB a token" in text


def test_a_family_is_known_although_none_of_its_models_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = tuple(
        msgspec.structs.replace(model, package="no_such_package") for model in PACKAGED_MODELS
    )
    monkeypatch.setattr("tidegate.engine.checkpoint.packaged_models.PACKAGED_MODELS", missing)
    found = {model.name: model for model in models.known_models("bfloat16")}
    gemma = found["gemma3-270m"]
    assert gemma.swa_only_transfer is True and not gemma.is_installed
    assert [group.pool for group in gemma.groups] == ["full", "window"]
    assert [group.bytes_per_token for group in gemma.groups] == [None, None]
    assert f"not installed: {gemma.install_command}" in models.render(list(found.values()))
    monkeypatch.setattr("tidegate.engine.checkpoint.packaged_models.PACKAGED_MODELS", ())
    families = models.known_models("bfloat16")
    assert [model.family for model in families] == list(FAMILIES)
    assert all(model.reason and model.groups for model in families)
    assert "gemma3 family" in models.render(families)


def test_an_unknown_model_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["models", "no-such-model"])
    assert ended.value.code == 2
    assert "no-such-model is not a model's name" in capsys.readouterr().err
