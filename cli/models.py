"""`tidegate models`: what can be served, and what each model keeps of a token."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

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
    from tidegate.engine.checkpoint.config import Family

DESCRIPTION = """\
Shows each known family of models with the models that come as packages, or the models that
are named: which layers share a pool, how far back each reads, how many bytes it keeps of a
token, and the flag swa_only_transfer with its reason. --json prints a list of models.
"""

LINE_WIDTH = 96


class GroupFacts(msgspec.Struct, frozen=True):
    """A group of layers that share a pool, with `reach` "all", "window" or "tail".

    What follows the rule is of one model, and None where only the family is known.
    `window_tokens` is None unless the layers have a window.
    """

    pool: str
    reach: str
    layer_kind: str
    bytes_per_token_rule: str
    layers: int | None = None
    reads: str | None = None
    window_tokens: int | None = None
    bytes_per_token: int | None = None


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be served, or a family of which none is installed.

    `context` and what follows it are known of installed models only.
    """

    family: str
    swa_only_transfer: bool | None
    reason: str
    window_tokens: int | None = None
    groups: tuple[GroupFacts, ...]
    name: str = ""
    description: str = ""
    is_installed: bool = False
    install_command: str = ""
    context: int | None = None
    vocab_size: int | None = None
    has_chat_template: bool | None = None


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
    from tidegate.engine.checkpoint.errors import CheckpointError
    from tidegate.kvcache.layout import LayoutError

    names: list[str] = arguments.models
    try:
        if names:
            models = [describe(name, arguments.dtype) for name in names]
        else:
            models = known_models(arguments.dtype)
    except (CheckpointError, LayoutError) as error:
        fail(arguments.parser.prog, str(error))
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(models)).decode() + "\n")
    else:
        sys.stdout.write(render(models))
    return 0


def known_models(dtype: str) -> list[ModelFacts]:
    """Each family: its packaged models, or the family alone where there is none."""
    from tidegate.engine.checkpoint.config import FAMILIES
    from tidegate.engine.checkpoint.packaged_models import PACKAGED_MODELS

    models: list[ModelFacts] = []
    for family in FAMILIES:
        packaged = [model for model in PACKAGED_MODELS if model.family == family]
        models += [
            msgspec.structs.replace(
                describe(model.name, dtype) if model.is_installed else describe_family(family),
                name=model.name,
                description=model.description,
                install_command=model.install_command,
            )
            for model in packaged
        ]
        if not packaged:
            models.append(describe_family(family))
    return models


def describe_family(family: "Family") -> ModelFacts:
    """What is true of every model of the family that has window layers, if any has."""
    from tidegate.engine.models.layouts import FAMILY_LAYOUTS

    facts = FAMILY_LAYOUTS[family]
    return ModelFacts(
        family=family,
        swa_only_transfer=facts.swa_only_transfer,
        reason=facts.reason,
        groups=tuple(
            GroupFacts(terms.pool, terms.reach, terms.layer_kind, terms.bytes_per_token_rule)
            for terms in facts.groups
        ),
    )


def describe(model: str, dtype: str) -> ModelFacts:
    """What the checkpoint's header and the family's layout tell. Reads no weights.

    Raises `CheckpointError` and `LayoutError`.
    """
    from tidegate.cli.reach_text import reads_text
    from tidegate.engine.checkpoint.registry import open_checkpoint
    from tidegate.engine.models.layouts import flag_reason, layout_for

    checkpoint = open_checkpoint(model, needs_weights=False)
    config = checkpoint.config
    layout = layout_for(config, DEFAULT_PAGE_TOKENS, dtype)
    family = describe_family(config.family)
    by_pool = {group.name: group for group in layout.groups}
    return msgspec.structs.replace(
        family,
        name=model,
        is_installed=True,
        context=config.context,
        vocab_size=config.vocab_size,
        has_chat_template=checkpoint.chat_template is not None,
        swa_only_transfer=layout.swa_only_transfer,
        reason=flag_reason(config.family, layout),
        window_tokens=config.window,
        groups=tuple(
            msgspec.structs.replace(
                terms,
                layers=len({spec.layer for spec in by_pool[terms.pool].tensors}),
                reads=reads_text(by_pool[terms.pool].reach),
                window_tokens=by_pool[terms.pool].window_tokens,
                bytes_per_token=by_pool[terms.pool].bytes_per_token,
            )
            for terms in family.groups
            if terms.pool in by_pool
        ),
    )


def render(models: Sequence[ModelFacts]) -> str:
    """For a terminal."""
    from tidegate.engine.checkpoint.config_from_gguf import ARCHITECTURES

    lines: list[str] = []
    for family in dict.fromkeys(model.family for model in models):
        mine = [model for model in models if model.family == family]
        lines += [*_family_lines(family), ""]
        for model in mine:
            if model.name:
                lines += [*_model_lines(model), ""]
    lines.append("Any model of these families can be served from a folder with config.json,")
    lines.append(
        "tokenizer.json and safetensors files; from a .gguf file too if it is of the family "
    )
    lines[-1] += f"{' or '.join(dict.fromkeys(ARCHITECTURES.values()))}."
    return "\n".join(lines) + "\n"


def _family_lines(family: str) -> list[str]:
    # The name comes out of a description, so it is one that is known.
    facts = describe_family(cast("Family", family))
    texts = [
        f"{group.pool} pool: {group.layer_kind}; bytes a token: {group.bytes_per_token_rule}"
        for group in facts.groups
    ]
    lines = [f"{family} family"]
    for text in (*texts, f"swa_only_transfer: {_flag_text(facts)}"):
        lines += textwrap.wrap(text, LINE_WIDTH, initial_indent="  ", subsequent_indent="    ")
    return lines


def _model_lines(model: ModelFacts) -> list[str]:
    title = f"  {model.name}: {model.description}" if model.description else f"  {model.name}"
    if not model.is_installed:
        return [title, f"    not installed: {model.install_command}"]
    chat = "with a chat template" if model.has_chat_template else "without a chat template"
    lines = [
        title,
        f"    context {model.context:,} tokens, vocabulary {model.vocab_size:,}, {chat}",
    ]
    for group in model.groups:
        article = "" if group.reach == "all" else "a "
        lines.append(
            f"    {group.pool} pool: {group.layers} layers that read {article}{group.reads}, "
            f"{bytes_text(group.bytes_per_token or 0)} a token"
        )
    family = describe_family(cast("Family", model.family))
    flag = _flag_text(model, reason=model.swa_only_transfer != family.swa_only_transfer)
    lines.append(f"    swa_only_transfer: {flag}")
    return lines


def _flag_text(facts: ModelFacts, *, reason: bool = True) -> str:
    flag = facts.swa_only_transfer
    shown = "not applicable" if flag is None else str(flag).lower()
    return f"{shown} ({facts.reason})" if reason else shown
