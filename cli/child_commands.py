"""Command lines of a server's processes: the inverse of what their commands parse."""

import sys
from pathlib import Path

from tidegate.clients.proxy.settings import ProxySettings
from tidegate.engine.settings import WorkerSettings
from tidegate.scheduler.process import SchedulerSettings

TIDEGATE = (sys.executable, "-m", "tidegate")

OptionValue = str | int | float | bool | Path | None


def scheduler_command(settings: SchedulerSettings) -> tuple[str, ...]:
    core = settings.core
    return (
        *TIDEGATE,
        "scheduler",
        *option("--client-endpoint", settings.client_endpoint),
        *option("--worker-endpoint", settings.worker_endpoint),
        *option("--chunk-tokens", core.chunk_tokens or "none"),
        *option("--mixed-chunk-tokens", core.mixed_chunk_tokens or "none"),
        *option("--default-max-tokens", core.default_max_tokens),
        *option("--queue-timeout", core.queue_timeout_us / 1e6),
        *option("--stall-timeout", core.stall_timeout_us / 1e6),
        *option("--fence-timeout", core.fence_timeout_us / 1e6),
        *option("--queue-requests", core.waiting_count_max),
        *option("--queue-tokens", core.waiting_tokens_max),
        *option("--tenant-queue-requests", core.tenant_waiting_count_max),
        *option("--tenant-queue-tokens", core.tenant_waiting_tokens_max),
        *option("--bypass-requests", core.bypass_count_max),
        *option("--bypass-tokens", core.bypass_tokens_max),
        *(
            part
            for tenant, weight in core.tenant_weights.items()
            for part in option("--tenant-weight", f"{tenant}={weight!r}")
        ),
        *(("--poison-freed-pages",) if core.poison_freed_pages else ()),
        *(() if core.prefix_cache else ("--no-prefix-cache",)),
        *(() if core.early_handoff else ("--no-early-handoff",)),
        *option("--fence-fd", settings.fence_fd),
        *option("--log", settings.log),
        *option("--log-level", settings.log_level),
    )


def worker_command(settings: WorkerSettings) -> tuple[str, ...]:
    return (
        *TIDEGATE,
        "worker",
        settings.model,
        *option("--role", settings.role.value),
        *option("--name", settings.name),
        *option("--endpoint", settings.endpoint),
        *option("--device", settings.device),
        *option("--dtype", settings.dtype),
        *option("--threads", settings.threads),
        *option("--max-running", settings.max_running),
        *option("--kv-memory", settings.kv_memory),
        *option("--full-pool-tokens", settings.full_pool_tokens),
        *option("--window-pool-tokens", settings.window_pool_tokens),
        *option("--page-tokens", settings.page_tokens),
        *option("--chunk-tokens", settings.chunk_tokens or "none"),
        *option("--swa-only-transfer", settings.swa_only_transfer),
        *option("--chat-template", settings.chat_template),
        *option("--log", settings.log),
        *option("--log-level", settings.log_level),
    )


def proxy_command(settings: ProxySettings) -> tuple[str, ...]:
    return (
        *TIDEGATE,
        "proxy",
        *option("--endpoint", settings.endpoint),
        *option("--host", settings.host),
        *option("--port", settings.port),
        *option("--listen-fd", settings.listen_fd),
        *option("--log", settings.log),
        *option("--log-level", settings.log_level),
    )


def option(name: str, value: OptionValue) -> tuple[str, ...]:
    """The option with its value, or nothing for None."""
    match value:
        case None:
            return ()
        case bool():
            return (name, str(value).lower())
        case _:
            return (name, str(value))
