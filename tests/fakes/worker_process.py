"""Worker processes of a tiny model, and the operations that give them work."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from oracle.make_tiny_checkpoint import VOCAB_SIZE
from tidegate.engine.settings import WorkerSettings
from tidegate.ipc.protocol import (
    PageRun,
    Report,
    RequestId,
    Role,
    Row,
    Sampling,
    Start,
    WorkerId,
    pack_ids,
)
from tidegate.kvcache.layout import Layout, Tokens

PAGE = 8
KV_MEMORY = 8 * 2**20


class WorkerProcess:
    """A worker started from `settings`, with its standard error kept."""

    def __init__(self, settings: WorkerSettings, *, pass_fds: Sequence[int] = ()) -> None:
        script = Path(__file__).parent / "start_worker.py"
        self.process = subprocess.Popen(
            [sys.executable, script, msgspec.json.encode(settings, enc_hook=str)],
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
        )

    def finish(self, timeout_s: float = 60) -> tuple[int, str]:
        """Wait for its end: the exit status and what it wrote."""
        _, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, errors.decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def settings_of(
    checkpoint: Path, name: WorkerId, endpoint: str, role: Role, log: Path | None = None
) -> WorkerSettings:
    return WorkerSettings(
        model=str(checkpoint),
        role=role,
        name=name,
        endpoint=endpoint,
        dtype="float32",
        page_tokens=PAGE,
        kv_memory=KV_MEMORY,
        max_running=8,
        threads=1,
        log=log,
    )


def prompt_of(length: int) -> list[int]:
    return [10 + (7 * i * i + 3 * i) % (VOCAB_SIZE - 10) for i in range(length)]


def runs(layout: Layout, ids_from: int, positions: int) -> tuple[PageRun, ...]:
    """Pages from `ids_from` on in every group, for positions [0, `positions`)."""
    return tuple(
        PageRun(0, pack_ids(range(ids_from, ids_from + group.pages(Tokens(positions)))))
        for group in layout.groups
    )


def start_of(
    layout: Layout,
    row: int,
    prompt: Sequence[int],
    limit: int,
    ids_from: int,
    sampling: Sampling | None = None,
) -> Start:
    return Start(
        Row(row),
        RequestId(f"request-{row}"),
        0,
        pack_ids(prompt),
        0,
        limit,
        runs(layout, ids_from, limit),
        sampling or Sampling(),
        b"",
        ignore_eos=True,
    )


def ends(report: Report, row: int) -> bool:
    return any(end.row == row for end in report.ended)
