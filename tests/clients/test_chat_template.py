"""Templates as Hugging Face models carry them."""

import json
from datetime import datetime

import pytest

from fakes.templates import ALTERNATING, CHATML
from tidegate.clients.chat_template import ChatTemplate, ChatTemplateError


def render(source: str, *contents: str) -> str:
    messages = [{"role": "user", "content": content} for content in contents]
    return ChatTemplate(source, "<s>", "</s>").render(messages)


def test_blocks_leave_no_blank_lines() -> None:
    source = "a\n  {% if true %}\n  b\n  {% endif %}\nc"
    assert render(source) == "a\n  b\nc"


def test_chat_is_rendered_up_to_where_the_answer_begins() -> None:
    assert render(CHATML, "hi") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_begin_and_end_tokens_are_known_to_the_template() -> None:
    assert render("{{ bos_token }}x{{ eos_token }}") == "<s>x</s>"


def test_json_is_written_as_it_is() -> None:
    assert render("{{ messages | tojson }}", "<é>") == '[{"role": "user", "content": "<é>"}]'
    assert json.loads(render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}"))


def test_the_day_can_be_asked() -> None:
    assert render("{{ strftime_now('%Y') }}") in map(str, range(2020, datetime.now().year + 1))


def test_loop_controls_and_generation_blocks_are_understood() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% break %}{% endfor %}"
    )
    assert render(source, "a", "b") == "a"


def test_a_refusal_of_the_template_says_why() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate user/assistant"):
        render(ALTERNATING, "a", "b")


def test_a_failure_of_the_template_is_reported_as_its_own() -> None:
    with pytest.raises(ChatTemplateError, match=r"fails on these messages: .*NoneType"):
        render("{{ 'a' + none }}")


def test_a_template_that_does_not_parse_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match=r"does not parse: .* \(line 2\)"):
        ChatTemplate("\n{% if %}")


@pytest.mark.parametrize("source", ["{{ messages.append(1) }}", "{{ range(10**9) | list }}"])
def test_a_template_that_breaks_out_is_stopped(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_a_template_sees_nothing_of_the_program() -> None:
    assert render("{{ raise_exception.__globals__ }}{{ ''.__class__ }}") == ""
