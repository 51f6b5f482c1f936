"""What the known model families read of earlier positions: their groups, without tensors."""

from collections.abc import Sequence

from tidegate.kvcache.layout import All, Group, Layout, Reach, Tail, Tokens, Window


def window(tokens: int) -> Window:
    return Window(Tokens(tokens))


def tail(ratio: int, overlap: int) -> Tail:
    return Tail(Tokens(ratio), overlap)


KNOWN: dict[str, tuple[tuple[str, Reach], ...]] = {
    "llama": (("full", All()),),
    "mistral": (("window", window(4096)),),
    "gemma3": (("full", All()), ("window", window(512))),
    "gemma4": (("full", All()), ("window", window(1024))),
    "mimo": (("full", All()), ("window", window(129))),
    "gpt-oss": (("full", All()), ("window", window(128))),
    "deepseek-v4": (
        ("full", All()),
        ("window", window(128)),
        ("csa_tail", tail(4, 0)),
        ("csa_overlap", tail(4, 1)),
        ("hca_tail", tail(128, 0)),
    ),
}


def layout_of(
    groups: Sequence[tuple[str, Reach]], page_tokens: Sequence[int], flag: bool
) -> Layout:
    """A layout of these groups and page sizes. Without a window the flag is left out."""
    has_window = any(isinstance(reach, Window) for _, reach in groups)
    return Layout(
        tuple(
            Group(name, reach, Tokens(size), ())
            for (name, reach), size in zip(groups, page_tokens, strict=True)
        ),
        flag if has_window else None,
    )
