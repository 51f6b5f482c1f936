"""The worker process: set up, load, join, loop, and leave in an orderly way.

1. Threads and signals are set up before torch is loaded.
2. The model is loaded and the pools are made; lines on standard error tell how far it is.
3. `Hello` is sent until the scheduler answers.
4. The step loop runs until a signal, an error, or the scheduler ends it.

Importing this module loads no torch: `run_worker` does, after it has set the environment
that OpenMP reads when it is loaded.
"""

import os
import signal
import sys
import traceback
from types import FrameType
from typing import NoReturn

from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.failures import WorkerFailure
from tidegate.engine.settings import SettingError, WorkerSettings
from tidegate.ipc.endpoints import EndpointError
from tidegate.ipc.lifeline import watch_lifeline
from tidegate.ipc.link_options import LinkError
from tidegate.ipc.log import Log, LogError, configure
from tidegate.ipc.log_events import LogEvent
from tidegate.kvcache.layout import LayoutError
from tidegate.kvcache.sizer import SizeError

STATUS_STOPPED = 0
STATUS_FAILED = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# Their texts tell an operator what to do; a traceback would not.
KNOWN_FAILURES = (
    CheckpointError,
    EndpointError,
    LayoutError,
    LinkError,
    MemoryError,
    OSError,
    SettingError,
    SizeError,
    WorkerFailure,
)


class StopRequested(BaseException):
    """A signal asks the process to stop. No handler of errors catches it by accident."""


def run_worker(settings: WorkerSettings) -> int:
    """Run the worker that `settings` describe, on the main thread; returns its exit status.

    0 after SIGTERM or SIGINT, which end it in a fraction of a second; 1 after an error, which
    is told on standard error and in the log.
    """
    if settings.lifeline_fd is not None:
        watch_lifeline(settings.lifeline_fd)
    try:
        settings.check()
        log_path = None if settings.log is None else str(settings.log)
        log = configure(settings.name, log_path, settings.log_level)
    except (SettingError, LogError) as error:
        _say(settings, str(error))
        return STATUS_FAILED
    previous = {number: signal.signal(number, _stop) for number in STOP_SIGNALS}
    try:
        status, reason = _run(settings, log)
    except StopRequested as stop:
        status, reason = STATUS_STOPPED, str(stop)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if status != STATUS_STOPPED:
        _say(settings, reason)
    log.info(LogEvent.PROCESS_STOPPED, worker=settings.name, status=status, reason=reason)
    return status


def run_worker_process(settings: WorkerSettings) -> NoReturn:
    """`run_worker`, and then the end of the process with its status.

    Taking apart what torch has loaded takes a second on a busy machine and is of no use, so
    Python's own exit is skipped.
    """
    status = run_worker(settings)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(settings: WorkerSettings, log: Log) -> tuple[int, str]:
    """Returns the exit status and the reason of the end."""
    log.info(
        LogEvent.PROCESS_STARTED,
        worker=settings.name,
        role=settings.role.value,
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
    )
    try:
        _prepare_threads(settings.threads)
        # Only now, as OpenMP reads its environment when torch is loaded.
        from tidegate.engine.worker_process import serve

        serve(settings, log, lambda text: _say(settings, text))
    except KNOWN_FAILURES as error:
        log.error(LogEvent.PROCESS_STOPPING, worker=settings.name, reason=str(error))
        return STATUS_FAILED, str(error) or type(error).__name__
    except Exception as error:
        traceback.print_exc()
        log.exception(LogEvent.INTERNAL_ERROR, error)
        return STATUS_FAILED, f"an internal error: {type(error).__name__}"


def _prepare_threads(count: int | None) -> None:
    # Threads of two processes on the same cores must not spin at barriers: with OpenMP's own
    # setting two workers of two threads each on two cores are ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if count is not None:
        os.environ["OMP_NUM_THREADS"] = str(count)


def _stop(signal_number: int, frame: FrameType | None) -> None:
    raise StopRequested(signal.Signals(signal_number).name)


def _say(settings: WorkerSettings, text: str) -> None:
    print(f"{settings.name}: {text}", file=sys.stderr, flush=True)
