"""Settings of a server, checked when it starts: what one option cannot tell of itself alone.

Every check raises `SettingError`, whose text begins with the option's name and says what
would be right.
"""

import argparse
import os
from pathlib import Path

from tidegate.cli.paths import default_log_file
from tidegate.cli.pool_checks import check_pool_tokens
from tidegate.cli.queue_options import half_of, tenant_weights
from tidegate.clients.logs.words import bytes_text
from tidegate.clients.proxy.settings import ProxySettings
from tidegate.engine.settings import SettingError, WorkerSettings
from tidegate.ipc.protocol import Role, WorkerId
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.process import SchedulerSettings
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.shell import ShellSettings

KV_MEMORY_BYTES_DEFAULT = 1024**3
KV_MEMORY_SHARE_DEFAULT = 0.10
PROXY_STOP_GRACE_MS = 500  # With the last sends, less than the supervisor gives it.
MEMORY_FACTS = Path("/proc/meminfo")


def worker_settings(
    arguments: argparse.Namespace, *, role: Role, name: str, endpoint: str, worker_count: int
) -> WorkerSettings:
    """One worker's settings, checked, with what was left out filled in where it can be.

    `worker_count` workers share this machine.
    """
    check_device(arguments.device)
    page_tokens: int = arguments.page_tokens
    check_pool_tokens("--full-pool-tokens", arguments.full_pool_tokens, page_tokens)
    check_pool_tokens("--window-pool-tokens", arguments.window_pool_tokens, page_tokens)
    threads: int | None = arguments.threads
    kv_memory: int | None = arguments.kv_memory
    if arguments.device == "cpu":
        threads = threads or threads_per_worker(worker_count)
        if kv_memory is None and arguments.full_pool_tokens is None:
            kv_memory = kv_memory_default()
        check_kv_memory(kv_memory or 0, worker_count)
    settings = WorkerSettings(
        model=arguments.model,
        role=role,
        name=WorkerId(name),
        endpoint=endpoint,
        device=arguments.device,
        dtype=arguments.dtype,
        page_tokens=page_tokens,
        kv_memory=kv_memory,
        full_pool_tokens=arguments.full_pool_tokens,
        window_pool_tokens=arguments.window_pool_tokens,
        max_running=arguments.max_running,
        chunk_tokens=arguments.chunk_tokens,
        swa_only_transfer=arguments.swa_only_transfer,
        threads=threads,
        chat_template=arguments.chat_template,
        log=log_file(arguments.log),
        log_level=arguments.log_level,
        lifeline_fd=getattr(arguments, "lifeline_fd", None),
    )
    settings.check()
    return settings


def scheduler_settings(
    arguments: argparse.Namespace, *, client_endpoint: str, worker_endpoint: str
) -> SchedulerSettings:
    chunk_tokens: int | None = arguments.chunk_tokens
    mixed: int | None = arguments.mixed_chunk_tokens
    core = CoreSettings(
        chunk_tokens=None if chunk_tokens is None else Tokens(chunk_tokens),
        mixed_chunk_tokens=None if mixed is None else Tokens(mixed),
        default_max_tokens=arguments.default_max_tokens,
        queue_timeout_us=round(arguments.queue_timeout * 1e6),
        stall_timeout_us=round(arguments.stall_timeout * 1e6),
        fence_timeout_us=round(arguments.fence_timeout * 1e6),
        poison_freed_pages=arguments.poison_freed_pages,
        prefix_cache=arguments.prefix_cache,
        early_handoff=arguments.early_handoff,
        waiting_count_max=arguments.queue_requests,
        waiting_tokens_max=arguments.queue_tokens,
        tenant_waiting_count_max=arguments.tenant_queue_requests
        or half_of(arguments.queue_requests),
        tenant_waiting_tokens_max=arguments.tenant_queue_tokens
        or half_of(arguments.queue_tokens),
        bypass_count_max=arguments.bypass_requests,
        bypass_tokens_max=arguments.bypass_tokens,
        tenant_weights=tenant_weights(arguments),
    )
    return SchedulerSettings(
        client_endpoint=client_endpoint,
        worker_endpoint=worker_endpoint,
        core=core,
        shell=ShellSettings(
            worker_silence_s_max=arguments.stall_timeout + arguments.fence_timeout
        ),
        log=log_file(arguments.log),
        log_level=arguments.log_level,
        lifeline_fd=getattr(arguments, "lifeline_fd", None),
        fence_fd=getattr(arguments, "fence_fd", None),
    )


def proxy_settings(
    arguments: argparse.Namespace, *, endpoint: str | None, listen_fd: int | None
) -> ProxySettings:
    """A proxy's settings. It listens on the open socket `listen_fd` if that is given."""
    return ProxySettings(
        endpoint=endpoint,
        host=arguments.host,
        port=arguments.port,
        listen_fd=listen_fd,
        lifeline_fd=getattr(arguments, "lifeline_fd", None),
        log=log_file(arguments.log),
        log_level=arguments.log_level,
        stop_grace_ms=PROXY_STOP_GRACE_MS,
    )


def check_device(device: str) -> None:
    """For cuda: that torch can use it, and that there is one of this number."""
    if device == "cpu":
        return
    import torch  # Only where a GPU is asked for: loading it takes seconds.

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        build = "this torch is built without CUDA" if torch.version.cuda is None else "no GPU"
        raise SettingError(f"--device {device}: {build}; use --device cpu")
    number = int(device.partition(":")[2] or 0)
    if number >= found:
        raise SettingError(f"--device {device}: there are cuda:0 to cuda:{found - 1}")


def check_chat_template(path: Path | None) -> None:
    """That a template that was given parses, before the first chat finds out."""
    if path is None:
        return
    # Here, since a worker that is started alone needs no jinja2.
    from tidegate.clients.chat_template import ChatTemplate, ChatTemplateError

    try:
        ChatTemplate(path.read_text(encoding="utf-8"))
    except ChatTemplateError as error:
        raise SettingError(f"--chat-template: {path}: {error}") from None


def check_kv_memory(kv_memory: int, worker_count: int) -> None:
    """On cpu: that the pools of all workers fit into the memory there is."""
    available = memory_available()
    if available is not None and kv_memory * worker_count > available:
        raise SettingError(
            f"--kv-memory: {bytes_text(kv_memory)} for each of {worker_count} workers is more "
            f"than the {bytes_text(available)} of memory available; ask for less"
        )


def memory_available() -> int | None:
    """Bytes that can be used without swapping; None where the system does not tell."""
    try:
        for line in MEMORY_FACTS.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def kv_memory_default() -> int:
    available = memory_available()
    if available is None:
        return KV_MEMORY_BYTES_DEFAULT
    return min(KV_MEMORY_BYTES_DEFAULT, int(available * KV_MEMORY_SHARE_DEFAULT))


def threads_per_worker(worker_count: int) -> int:
    """Two workers with all cores each would spin against one another."""
    return max(1, len(os.sched_getaffinity(0)) // worker_count)


def log_file(chosen: Path | None) -> Path:
    """The file that log lines go to, which can be appended to. Only the default's folder is
    made: a typing error makes no folders."""
    path = default_log_file() if chosen is None else chosen.absolute()
    try:
        if chosen is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise SettingError(
            f"--log: must be a file that can be appended to; {path}: {error.strerror}"
        ) from None
    return path
