"""`tidegate models`: what can be served, and what each model keeps of a token."""

import argparse
import sys
from typing import TYPE_CHECKING

import msgspec

from tidegate.cli import values
from tidegate.cli.options import (
    DEFAULT_DTYPE,
    DEFAULT_PAGE_TOKENS,
    Subparsers,
    add_command,
)
from tidegate.cli.parser import fail
from tidegate.clients.logs.words import bytes_text

if TYPE_CHECKING:
    from tidegate.engine.checkpoint.config import ModelConfig
    from tidegate.kvcache.layout import Reach

DESCRIPTION = """\
Shows the models that come as packages, or those that are named, with their KV layout: which
layers share a pool, how far back each reads, and how many bytes it keeps of a token.
"""


class GroupFacts(msgspec.Struct, frozen=True):
    """A group of layers that share a pool. `window` is None where all is read."""

    pool: str
    layers: int
    window: int | None
    bytes_per_token: int


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be served; the fields from `family` on are known of installed ones."""

    name: str
    description: str = ""
    is_installed: bool = True
    install_command: str = ""
    family: str = ""
    context: int = 0
    vocab_size: int = 0
    has_chat_template: bool = False
    swa_only_transfer: bool | None = None
    groups: tuple[GroupFacts, ...] = ()


class Models(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    families: tuple[str, ...]
    models: tuple[ModelFacts, ...]


def add(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "models", run, "show models and KV layouts", DESCRIPTION)
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a packaged model's name, a .gguf file or a folder (default: all packaged models)",
    )
    parser.add_argument(
        "--dtype",
        type=values.dtype,
        default=DEFAULT_DTYPE,
        help=f"the pools' number format (default {DEFAULT_DTYPE})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from tidegate.engine.checkpoint.config import FAMILIES
    from tidegate.engine.checkpoint.errors import CheckpointError
    from tidegate.engine.checkpoint.packaged_models import PACKAGED_MODELS
    from tidegate.kvcache.layout import LayoutError

    names: list[str] = arguments.models
    try:
        if names:
            found = [describe(name, ModelFacts(name=name), arguments.dtype) for name in names]
        else:
            packaged = [
                ModelFacts(
                    name=model.name,
                    description=model.description,
                    is_installed=model.is_installed,
                    install_command=model.install_command,
                )
                for model in PACKAGED_MODELS
            ]
            found = [
                describe(facts.name, facts, arguments.dtype) if facts.is_installed else facts
                for facts in packaged
            ]
    except (CheckpointError, LayoutError) as error:
        fail(arguments.parser.prog, str(error))
    models = Models(tuple(FAMILIES), tuple(found))
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(models)).decode() + "\n")
    else:
        sys.stdout.write(render(models))
    return 0


def describe(model: str, facts: ModelFacts, dtype: str) -> ModelFacts:
    """`facts` with what the checkpoint's header and the family's code tell.

    Raises `CheckpointError` and `LayoutError`.
    """
    from tidegate.engine.checkpoint.registry import open_checkpoint
    from tidegate.engine.models.registry import layout_for

    checkpoint = open_checkpoint(model)
    config: ModelConfig = checkpoint.config
    layout = layout_for(config, DEFAULT_PAGE_TOKENS, dtype)
    groups = tuple(
        GroupFacts(
            group.name,
            len({spec.layer for spec in group.tensors}),
            _window_of(group.reach),
            group.page_bytes // group.page_tokens,
        )
        for group in layout.groups
    )
    return msgspec.structs.replace(
        facts,
        family=config.family,
        context=config.context,
        vocab_size=config.vocab_size,
        has_chat_template=checkpoint.chat_template is not None,
        swa_only_transfer=layout.swa_only_transfer,
        groups=groups,
    )


def render(models: Models) -> str:
    """For a terminal."""
    lines: list[str] = []
    for model in models.models:
        lines += [*_model_lines(model), ""]
    families = " and ".join(models.families)
    lines.append(f"Any model of the families {families} can be served from a .gguf file, or")
    lines.append("from a folder with config.json, tokenizer.json and safetensors files.")
    return "\n".join(lines) + "\n"


def _model_lines(model: ModelFacts) -> list[str]:
    title = f"{model.name}: {model.description}" if model.description else model.name
    if not model.is_installed:
        return [title, f"  not installed: {model.install_command}"]
    chat = "with a chat template" if model.has_chat_template else "without a chat template"
    lines = [
        title,
        f"  family {model.family}, context {model.context:,} tokens, "
        f"vocabulary {model.vocab_size:,}, {chat}",
    ]
    for group in model.groups:
        reach = "all positions" if group.window is None else f"a window of {group.window:,}"
        lines.append(
            f"  {group.pool} pool: {group.layers} layers that read {reach}, "
            f"{bytes_text(group.bytes_per_token)} a token"
        )
    if model.swa_only_transfer is not None:
        lines.append(f"  swa_only_transfer: {str(model.swa_only_transfer).lower()}")
    return lines


def _window_of(reach: "Reach") -> int | None:
    from tidegate.kvcache.layout import Window

    return reach.tokens if isinstance(reach, Window) else None
