"""The `tidegate` command: what it says, and with which status it ends."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tidegate import __version__
from tidegate.cli.main import build_parser, main

COMMANDS = ("serve", "scheduler", "worker", "proxy", "models", "logs")


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--help") == 0
    text = capsys.readouterr().out
    assert all(f"\n    {command}" in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(command, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: tidegate {command}")


def test_serve_shows_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("serve", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for default in (
        "(default 127.0.0.1: this machine only)",
        "(default 8000)",
        "(default cpu)",
        "(default bfloat16)",
        "tokens in a page (default 16)",
        "no bound (default 512)",
        "runs at once (default 32)",
        "room for it (default 1024)",
    ):
        assert default in text


def test_nothing_asked_for_is_answered_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of() == 2
    assert "tidegate serve" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--version") == 0
    assert capsys.readouterr().out == f"tidegate {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--kv-memory", "2G"], "--kv-memory"),
        (["serve", "--chunk-tokens", "0"], "--chunk-tokens"),
        (["serve", "--max-run", "3"], "--max-run"),  # No abbreviations.
        (["serve", "--run-dir", "/dev/null"], "--run-dir"),
        (["serve", "--log", "/dev/null/x"], "--log"),
        (["serve", "no-such-model", "--log", "/dev/null"], "no-such-model"),
        (["serve", "--swa-only-transfer", "both"], "--swa-only-transfer"),
        (["worker"], "--role"),
        (["worker", "--role", "all"], "--role"),
        (["worker", "--role", "both", "--full-pool-tokens", "1"], "--full-pool-tokens"),
        (["proxy", "--port", "0", "--host", "203.0.113.1"], "--host"),
        (["scheduler", "--client-endpoint", "nowhere", "--log", "/dev/null"], "nowhere"),
        (["models", "no-such-model"], "no-such-model"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("tidegate")
    assert said.err.count("\n") == 1
    assert named in said.err


def test_the_flag_is_for_models_with_window_layers(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--swa-only-transfer", "false", "--log", "/dev/null", "--port", "0")
    assert status_of("serve", "smollm2-135m", *options) == 2
    assert "--swa-only-transfer: smollm2-135m has no window layers" in capsys.readouterr().err


def test_a_chat_template_is_parsed_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}")
    options = ("--chat-template", str(template), "--log", "/dev/null", "--port", "0")
    assert status_of("serve", "smollm2-135m", *options) == 2
    assert f"--chat-template: {template}: the chat template does not" in capsys.readouterr().err


def test_logs_are_read_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    line = {
        "time": "2026-01-02T03:04:05.000000Z",
        "event": "request_refused",
        "process": "scheduler",
        "request_id": "e-1",
        "status": 400,
        "code": "kv_pool_exceeded",
        "text": "too long",
        "pool": "full",
        "needed": 9,
        "limit": 8,
    }
    log.write_bytes(msgspec.json.encode(line) + b"\n")
    assert status_of("logs", "summary", str(log)) == 0
    assert "0 finished, 1 refused" in capsys.readouterr().out
    assert status_of("logs", "summary", "--json", str(log)) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["refusals"][0]["needed_max"] == 9
    assert status_of("logs", "story", "e-1", str(log)) == 0
    assert "Refused with 400" in capsys.readouterr().out
    assert status_of("logs", "why", "e-1", str(log)) == 0
    assert "It was refused (kv_pool_exceeded): too long" in capsys.readouterr().out
    assert status_of("logs", "why", "--json", "e-1", str(log)) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["end_event"] == "request_refused"
    assert status_of("logs", "why", "e-2", str(log)) == 1
    assert capsys.readouterr().err.startswith("tidegate logs why: no request in")
    assert status_of("logs", "story", "e-2", str(log)) == 1
    assert capsys.readouterr().err.startswith("tidegate logs story: no request in")
    assert status_of("logs", "summary", str(tmp_path / "none")) == 1
    assert "No such file" in capsys.readouterr().err


def test_logs_default_to_the_servers_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    arguments = build_parser().parse_args(["logs", "summary"])
    assert arguments.file == tmp_path / "tidegate" / "log.jsonl"


def test_models_tell_their_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("models", "smollm2-135m") == 0
    text = capsys.readouterr().out
    assert "llama family" in text
    assert "context 8,192 tokens" in text
    assert "full pool: 30 layers that read all positions" in text
    for dtype, bytes_per_token in (("bfloat16", 23040), ("float32", 46080)):
        assert status_of("models", "--json", "--dtype", dtype, "smollm2-135m") == 0
        (facts,) = msgspec.json.decode(capsys.readouterr().out)
        assert facts["family"] == "llama"
        assert facts["swa_only_transfer"] is None
        (group,) = facts["groups"]
        assert (group["pool"], group["layers"]) == ("full", 30)
        assert group["bytes_per_token"] == bytes_per_token


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("")
    command = f"{sys.executable} -m tidegate logs summary {log} | true"
    run = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert run.stderr == ""
