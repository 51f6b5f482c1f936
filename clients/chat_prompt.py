"""Makes a chat's token ids, in which only the chat template writes control tokens.

1. Whatever in a message looks like a control token is replaced by a stand-in: one character
   from a private area of Unicode that occurs nowhere else in the chat or in the template.
2. The template is rendered. Control tokens in the result are the template's own.
3. The text between two of them, of template and messages together, gets its own wording back
   and is encoded in one go, as text.

What that guarantees: if no message holds the text of a control token, the ids are those of the
whole rendered text, with all the merges over the edges of messages. If one does, these letters
are encoded as letters, and nothing else changes.
"""

import random
from collections.abc import Sequence

import msgspec

from tidegate.clients.chat_template import ChatTemplate, ChatTemplateError
from tidegate.clients.control_tokens import ControlTokens
from tidegate.clients.tokeniser import Tokeniser

PRIVATE_AREA = range(0x100000, 0x10FFFE)  # Unicode's plane 16.


class ChatMessage(msgspec.Struct, frozen=True):
    """One message. The role is one of a fixed list: it may be part of a control token."""

    role: str
    content: str
    name: str | None = None


def encode_chat(
    tokeniser: Tokeniser, template: ChatTemplate, messages: Sequence[ChatMessage]
) -> list[int]:
    """The ids of the prompt, up to where the answer begins.

    Takes about a second for each megabyte: run it in a thread for long chats. Raises
    `ChatTemplateError` when the template refuses the messages.
    """
    control = tokeniser.control_tokens
    found = _control_texts(control, messages)
    stand_ins = _stand_ins(found, template.source, messages)
    rendered = template.render([_hide(message, control, stand_ins) for message in messages])

    restore = {ord(stand_in): text for text, stand_in in stand_ins.items()}
    ids: list[int] = []
    begin, strips = 0, False
    for start, end, token in control.find(rendered):
        part = rendered[begin:start]
        part = part.lstrip() if strips else part
        part = part.rstrip() if token.strips_left else part
        ids += tokeniser.encode_part(part.translate(restore), is_first=begin == 0)
        ids.append(token.token_id)
        begin, strips = end, token.strips_right
    rest = rendered[begin:].lstrip() if strips else rendered[begin:]
    return ids + tokeniser.encode_part(rest.translate(restore), is_first=begin == 0)


def _control_texts(control: ControlTokens, messages: Sequence[ChatMessage]) -> list[str]:
    """The texts of control tokens that occur in messages, each once."""
    texts = [text for message in messages for text in (message.content, message.name or "")]
    found = (each.token.content for text in texts for each in control.find(text))
    return list(dict.fromkeys(found))


def _stand_ins(
    control_texts: Sequence[str], template: str, messages: Sequence[ChatMessage]
) -> dict[str, str]:
    """A character for each control text, which occurs in no message and not in the template."""
    if not control_texts:
        return {}
    taken = set(template).union(
        *(message.content + (message.name or "") for message in messages)
    )
    free = [code for code in PRIVATE_AREA if chr(code) not in taken]
    if len(free) < len(control_texts):
        raise ChatTemplateError("the messages use up Unicode's private plane 16")
    # Which characters is of no consequence: drawn, so that no template comes to rely on them.
    chosen = random.sample(free, len(control_texts))
    return {text: chr(code) for text, code in zip(control_texts, chosen, strict=True)}


def _hide(
    message: ChatMessage, control: ControlTokens, stand_ins: dict[str, str]
) -> dict[str, str]:
    """The message as the template sees it."""

    def hide(text: str) -> str:
        parts: list[str] = []
        begin = 0
        for start, end, token in control.find(text) if stand_ins else ():
            parts += text[begin:start], stand_ins[token.content]
            begin = end
        return "".join([*parts, text[begin:]])

    fields = {"role": message.role, "content": hide(message.content)}
    return fields if message.name is None else fields | {"name": hide(message.name)}
