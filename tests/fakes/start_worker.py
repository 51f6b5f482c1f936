"""Runs one worker process. Its argument is its settings as JSON."""

import sys
from typing import Any

import msgspec

from tidegate.engine.settings import WorkerSettings
from tidegate.engine.worker import run_worker_process


def make_field(kind: type[Any], value: Any) -> Any:
    return kind(value)


if __name__ == "__main__":
    settings = msgspec.json.decode(sys.argv[1], type=WorkerSettings, dec_hook=make_field)
    run_worker_process(settings)
