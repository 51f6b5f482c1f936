"""Renders a model's chat template, written in Jinja as Hugging Face models carry it.

The template is the model's, the messages are a stranger's: it runs in Jinja's sandbox, which
lets it change nothing.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class ChatTemplateError(ValueError):
    """The template is broken, or refuses these messages; the text says why."""


class ChatTemplate:
    """A compiled template. Raises `ChatTemplateError` when it does not parse."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self._bos_token = bos_token
        self._eos_token = eos_token
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source, globals=functions)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template does not parse: {error.message} (line {error.lineno})"
            ) from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt's text, up to where the assistant's answer begins.

        Each message has `role` and `content`. Raises `ChatTemplateError` when the template
        refuses the messages or fails on them.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                bos_token=self._bos_token,
                eos_token=self._eos_token,
            )
        except ChatTemplateError:
            raise
        except Exception as error:  # A template can fail in any way that Python can.
            raise ChatTemplateError(
                f"the chat template fails on these messages: {error}"
            ) from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; here it is plain."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(f"the chat template refuses these messages: {message}")


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter would write <, > and & as escapes, for web pages.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
