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
import re
from collections.abc import Sequence

import msgspec

from tidegate.clients.chat_template import ChatTemplate, ChatTemplateError
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
    found = _control_texts(tokeniser.control_pattern, messages)
    stand_ins = _stand_ins(found, template.source, messages)
    hidden = [_hide(message, tokeniser.control_pattern, stand_ins) for message in messages]
    rendered = template.render(hidden)

    restore = {ord(stand_in): text for text, stand_in in stand_ins.items()}
    ids: list[int] = []
    start, strips = 0, False
    for match in tokeniser.control_pattern.finditer(rendered):
        token = tokeniser.control_tokens[match.group()]
        part = rendered[start : match.start()]
        part = part.lstrip() if strips else part
        part = part.rstrip() if token.strips_left else part
        ids += tokeniser.encode_part(part.translate(restore), is_first=start == 0)
        ids.append(token.token_id)
        start, strips = match.end(), token.strips_right
    rest = rendered[start:].lstrip() if strips else rendered[start:]
    return ids + tokeniser.encode_part(rest.translate(restore), is_first=start == 0)


def _control_texts(pattern: re.Pattern[str], messages: Sequence[ChatMessage]) -> list[str]:
    """The texts of control tokens that occur in messages, each once."""
    texts = [text for message in messages for text in (message.content, message.name or "")]
    return list(dict.fromkeys(found for text in texts for found in pattern.findall(text)))


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
    message: ChatMessage, pattern: re.Pattern[str], stand_ins: dict[str, str]
) -> dict[str, str]:
    def hide(text: str) -> str:
        return pattern.sub(lambda match: stand_ins[match.group()], text)

    fields = {"role": message.role, "content": hide(message.content)}
    return fields if message.name is None else fields | {"name": hide(message.name)}
