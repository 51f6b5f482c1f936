"""What an operator can set of a worker. Importing this loads no torch."""

from pathlib import Path

import msgspec

from tidegate.ipc.protocol import Role, WorkerId


class SettingError(ValueError):
    """A setting that cannot be used; the text names it and says what would be right."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `run_worker` needs.

    `kv_memory` is in bytes; None sizes the pools by `full_pool_tokens`, or on a GPU by its
    free memory. `threads` None leaves torch's own number. `lifeline_fd` is the read end of a
    pipe whose end of file means that the worker's parent is gone. `log` None writes to stderr;
    at the level "debug" it has a line for each launch.
    """

    model: str
    role: Role
    name: WorkerId
    endpoint: str
    device: str = "cpu"
    dtype: str = "bfloat16"
    page_tokens: int = 16
    kv_memory: int | None = None
    full_pool_tokens: int | None = None
    window_pool_tokens: int | None = None
    max_running: int = 32
    chunk_tokens: int | None = 512
    ahead_tokens: int = 32
    swa_only_transfer: bool | None = None
    threads: int | None = None
    chat_template: Path | None = None
    log: Path | None = None
    log_level: str = "info"
    lifeline_fd: int | None = None

    def check(self) -> None:
        """Raise `SettingError` for a value that no worker can use."""
        least_one = {
            "--page-tokens": self.page_tokens,
            "--kv-memory": self.kv_memory,
            "--full-pool-tokens": self.full_pool_tokens,
            "--window-pool-tokens": self.window_pool_tokens,
            "--max-running": self.max_running,
            "--chunk-tokens": self.chunk_tokens,
            "--threads": self.threads,
        }
        for option, value in least_one.items():
            if value is not None and value < 1:
                raise SettingError(f"{option} must be at least 1, got {value}")
        if self.ahead_tokens < 1:
            raise SettingError(f"ahead_tokens must be at least 1, got {self.ahead_tokens}")
        if self.device.startswith("cuda") and self.role is not Role.BOTH:
            raise SettingError(
                f"--role {self.role.value} with --device {self.device}: pages cannot be "
                "handed over between GPU workers yet. Use one worker of role both "
                "(serve --role-both), or --device cpu"
            )
