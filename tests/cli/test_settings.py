"""Settings are checked when a server starts; an error says what would be right."""

import os
from pathlib import Path

import pytest

from tidegate.cli import child_commands, settings
from tidegate.cli.main import build_parser
from tidegate.cli.paths import default_log_file
from tidegate.engine.settings import SettingError, WorkerSettings
from tidegate.ipc.protocol import Role
from tidegate.scheduler.process import SchedulerSettings


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def worker(*options: str, worker_count: int = 1, role: Role = Role.BOTH) -> WorkerSettings:
    arguments = build_parser().parse_args(["worker", "--role", role.value, *options])
    return settings.worker_settings(
        arguments, role=role, name="w", endpoint="ipc:///x", worker_count=worker_count
    )


def scheduler(*options: str) -> SchedulerSettings:
    arguments = build_parser().parse_args(["scheduler", *options])
    return settings.scheduler_settings(
        arguments, client_endpoint="ipc:///c", worker_endpoint="ipc:///w"
    )


def test_defaults_are_those_of_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "memory_available", lambda: 100 * 1024**3)
    made = worker()
    assert (made.model, made.device, made.dtype) == ("gemma3-270m", "cpu", "bfloat16")
    assert (made.page_tokens, made.chunk_tokens, made.max_running) == (16, 512, 32)
    assert made.kv_memory == 1024**3
    assert made.swa_only_transfer is None
    assert scheduler().core.default_max_tokens == 1024


def test_a_small_machine_gives_a_tenth_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "memory_available", lambda: 2_000_000_000)
    assert worker().kv_memory == 200_000_000


def test_a_pool_given_in_tokens_needs_no_memory_size() -> None:
    assert worker("--full-pool-tokens", "4096").kv_memory is None


def test_memory_is_asked_for_all_workers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "memory_available", lambda: 3 * 1024**3)
    assert worker("--kv-memory", "2GiB").kv_memory == 2 * 1024**3
    with pytest.raises(SettingError, match=r"--kv-memory: 2\.0 GiB for each of 2 workers"):
        worker("--kv-memory", "2GiB", worker_count=2)


def test_the_memory_of_this_machine_can_be_read() -> None:
    available = settings.memory_available()
    assert available is not None
    assert available > 10**6


def test_two_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def five_cores(_: int) -> set[int]:
        return set(range(5))

    monkeypatch.setattr(os, "sched_getaffinity", five_cores)
    assert settings.threads_per_worker(2) == 2
    assert settings.threads_per_worker(8) == 1
    assert worker("--threads", "3").threads == 3


@pytest.mark.parametrize("option", ["--full-pool-tokens", "--window-pool-tokens"])
def test_a_pool_has_one_page_at_least(option: str) -> None:
    with pytest.raises(
        SettingError, match=rf"^{option}: .* 16 tokens \(--page-tokens\), got 15"
    ):
        worker(option, "15")


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match=r"^--device cuda: .*; use --device cpu"):
        worker("--device", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SettingError, match=r"^--device cuda:2: there are cuda:0 to cuda:1"):
        worker("--device", "cuda:2")


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=rf"^--log: .*{tmp_path}: Is a directory"):
        worker("--log", str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"^--log: .*Not a directory"):
        worker("--log", str(tmp_path / "file" / "log.jsonl"))
    with pytest.raises(SettingError, match=r"^--log: .*No such file or directory"):
        worker("--log", str(tmp_path / "missing" / "log.jsonl"))
    assert not (tmp_path / "missing").exists()


def test_the_default_log_is_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker().log == tmp_path / "state" / "tidegate" / "log.jsonl"
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_log_file() == tmp_path / ".local" / "state" / "tidegate" / "log.jsonl"


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("smollm2-135m", "--dtype", "float32", "--threads", "3", "--max-running", "7"),
        ("--kv-memory", "64MiB", "--page-tokens", "32", "--chunk-tokens", "none"),
        ("--full-pool-tokens", "4096", "--window-pool-tokens", "2048"),
        ("--swa-only-transfer", "false", "--log-level", "debug"),
        ("--swa-only-transfer", "true", "--chat-template", __file__),
    ],
)
def test_a_workers_command_line_means_its_settings(options: tuple[str, ...]) -> None:
    made = worker(*options, role=Role.DECODE)
    command = child_commands.worker_command(made)
    arguments = build_parser().parse_args(command[len(child_commands.TIDEGATE) :])
    again = settings.worker_settings(
        arguments,
        role=arguments.role,
        name=arguments.name,
        endpoint=arguments.endpoint,
        worker_count=1,
    )
    assert again == made


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--chunk-tokens", "none", "--default-max-tokens", "7", "--queue-timeout", "0.25"),
        ("--mixed-chunk-tokens", "none"),
        ("--mixed-chunk-tokens", "100"),
        ("--poison-freed-pages", "--log", "/dev/null", "--log-level", "warning"),
        ("--no-early-handoff", "--no-prefix-cache"),
        ("--queue-requests", "1", "--queue-tokens", "9", "--tenant-queue-tokens", "5"),
        ("--bypass-requests", "0", "--bypass-tokens", "77"),
        ("--tenant-weight", "a=b=0.1", "--tenant-weight", "research team=3"),
    ],
)
def test_a_schedulers_command_line_means_its_settings(options: tuple[str, ...]) -> None:
    made = scheduler(*options)
    command = child_commands.scheduler_command(made)
    arguments = build_parser().parse_args(command[len(child_commands.TIDEGATE) :])
    again = settings.scheduler_settings(
        arguments,
        client_endpoint=arguments.client_endpoint,
        worker_endpoint=arguments.worker_endpoint,
    )
    assert again == made


def test_one_tenant_may_fill_half_of_the_queue_unless_told_otherwise() -> None:
    core = scheduler("--queue-requests", "7", "--queue-tokens", "1").core
    assert (core.waiting_count_max, core.tenant_waiting_count_max) == (7, 3)
    assert (core.waiting_tokens_max, core.tenant_waiting_tokens_max) == (1, 1)
    assert scheduler("--tenant-queue-requests", "9").core.tenant_waiting_count_max == 9


def test_weights_of_tenants_are_gathered() -> None:
    options = ("--tenant-weight", "a=2", "--tenant-weight", "b=0.5")
    assert scheduler(*options).core.tenant_weights == {"a": 2.0, "b": 0.5}
