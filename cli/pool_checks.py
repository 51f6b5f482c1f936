"""Checks of options about pools, against each other and against the model.

Each raises `SettingError`, whose text begins with the option's name and says what would be
right. Importing this loads neither torch nor trio.
"""

import argparse

from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.settings import SettingError


def check_pool_tokens(option: str, tokens: int | None, page_tokens: int) -> None:
    if tokens is not None and tokens < page_tokens:
        raise SettingError(
            f"{option}: must be one page at least, which is {page_tokens} tokens "
            f"(--page-tokens), got {tokens}"
        )


def check_model(arguments: argparse.Namespace, config: ModelConfig) -> None:
    """That no option speaks of window layers, or of full ones, to a model that has none."""
    if all(config.layer_is_window) and arguments.full_pool_tokens is not None:
        raise SettingError(
            f"--full-pool-tokens: {config.name} has window layers only; give "
            "--window-pool-tokens or --kv-memory"
        )
    if config.has_window_layers:
        return
    for option, value in (
        ("--swa-only-transfer", arguments.swa_only_transfer),
        ("--window-pool-tokens", arguments.window_pool_tokens),
    ):
        if value is not None:
            raise SettingError(f"{option}: {config.name} has no window layers; leave it out")
