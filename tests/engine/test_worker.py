"""One real worker process: how it ends, and what it says of what it cannot use."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.scripted_scheduler import ScriptedScheduler
from fakes.worker_process import (
    KV_MEMORY,
    WorkerProcess,
    prompt_of,
    settings_of,
    start_of,
)
from oracle.make_tiny_checkpoint import make_tiny_checkpoint
from tidegate.engine.settings import WorkerSettings
from tidegate.engine.worker import STATUS_FAILED, run_worker
from tidegate.ipc.lifeline import LIFELINE_STATUS
from tidegate.ipc.protocol import (
    Chunk,
    Goodbye,
    Role,
    Row,
    WorkerId,
    WorkerRefused,
)

STOP_S_MAX = 1.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "gemma3")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_within_a_second_in_the_middle_of_work(
    checkpoint: Path, tmp_path: Path, number: signal.Signals
) -> None:
    name = WorkerId("both-0")
    log = tmp_path / "log.jsonl"
    with (
        ScriptedScheduler(tmp_path) as scheduler,
        WorkerProcess(
            settings_of(checkpoint, name, scheduler.endpoint, Role.BOTH, log)
        ) as worker,
    ):
        layout = scheduler.welcome(name).fingerprint.layout
        scheduler.plan(
            name, start_of(layout, 0, prompt_of(10), 1300, 0), Chunk(Row(0), 10, True)
        )
        scheduler.reports_until(name, lambda report: report.launch >= 3)
        begin = time.monotonic()
        worker.process.send_signal(number)
        assert scheduler.goodbye_of(name) == Goodbye(number.name)
        status, errors = worker.finish()
        assert time.monotonic() - begin < STOP_S_MAX
    assert status == 0
    assert "Traceback" not in errors
    assert "loaded in" in errors
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["event"], last["status"]) == ("process_stopped", 0)


def test_a_worker_that_is_refused_exits_with_the_reason(
    checkpoint: Path, tmp_path: Path
) -> None:
    name = WorkerId("decode-7")
    with (
        ScriptedScheduler(tmp_path) as scheduler,
        WorkerProcess(
            settings_of(checkpoint, name, scheduler.endpoint, Role.DECODE, tmp_path / "log")
        ) as worker,
    ):
        scheduler.hello_of(name)
        scheduler.send(name, WorkerRefused("it serves another model"))
        status, errors = worker.finish()
    assert status == STATUS_FAILED
    assert "decode-7: it serves another model" in errors
    assert "Traceback" not in errors


def test_a_worker_ends_when_its_scheduler_does(checkpoint: Path, tmp_path: Path) -> None:
    name = WorkerId("decode-0")
    scheduler = ScriptedScheduler(tmp_path)
    settings = settings_of(checkpoint, name, scheduler.endpoint, Role.DECODE, tmp_path / "log")
    with WorkerProcess(settings) as worker:
        with scheduler:
            scheduler.welcome(name)
            scheduler.plan(name)
            scheduler.reports_until(name, lambda report: report.applied == 1)
        status, errors = worker.finish(timeout_s=5)
    assert status == STATUS_FAILED
    assert "the connection to the scheduler was lost" in errors


def test_a_worker_ends_with_its_parent_while_it_waits(checkpoint: Path, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    settings = settings_of(
        checkpoint, WorkerId("w"), f"ipc://{tmp_path}/none.sock", Role.BOTH, tmp_path / "log"
    )
    settings = msgspec.structs.replace(settings, lifeline_fd=read_end)
    with WorkerProcess(settings, pass_fds=[read_end]) as worker:
        os.close(read_end)
        assert worker.process.stderr is not None
        while b"waiting for the scheduler" not in worker.process.stderr.readline():
            assert worker.process.poll() is None
        os.close(write_end)
        assert worker.finish(timeout_s=5)[0] == LIFELINE_STATUS


def bad_settings(**changes: Any) -> WorkerSettings:
    settings = WorkerSettings(
        model="no-such-model",
        role=Role.BOTH,
        name=WorkerId("w"),
        endpoint="ipc:///tmp/none.sock",
        kv_memory=KV_MEMORY,
    )
    return msgspec.structs.replace(settings, **changes)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (bad_settings(), "no-such-model is not a model's name"),
        (bad_settings(page_tokens=0), "--page-tokens must be at least 1, got 0"),
        (bad_settings(max_running=-1), "--max-running must be at least 1"),
        (bad_settings(log_level="loud"), "the log level is 'loud'"),
        (
            bad_settings(device="cuda", role=Role.PREFILL),
            "--role prefill with --device cuda: pages cannot be handed over",
        ),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(
    settings: WorkerSettings, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = msgspec.structs.replace(settings, log=tmp_path / "log")
    assert run_worker(settings) == STATUS_FAILED
    errors = capfd.readouterr().err
    assert errors.startswith("w: ")
    assert words in errors
    assert "Traceback" not in errors


def test_a_pool_that_holds_no_request_is_refused_with_what_would_do(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = bad_settings(model=str(checkpoint), kv_memory=10_000, log=tmp_path / "log")
    assert run_worker(settings) == STATUS_FAILED
    assert "--kv-memory: 10000 bytes do not hold one request" in capfd.readouterr().err
