"""What DeepSeek V4 keeps of a token, and where. Loads no torch.

1. Every layer keeps the keys of the last tokens, which are the values too: group "window".
2. Layers with compressed entries keep one entry for a window of tokens, and CSA layers a key
   of the indexer with it: group "full". Its pages hold whole entries of all its layers.
3. Until such a window is complete, its tokens' rows and gates are kept as they were projected:
   groups "csa_tail" and "hca_tail".
4. A CSA entry is made of the window before too: group "csa_overlap" keeps that part of its
   rows, and of its gates with the bias, from the end of one window to the end of the next.

No layer reads anything else, so a hand-off may leave out what lies below the window.
"""

from dataclasses import dataclass

from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.checkpoint.families.deepseek_v4 import SERIES, DeepSeekV4Config, LayerKind
from tidegate.kvcache.layout import (
    All,
    Group,
    Layout,
    Tail,
    TensorSpec,
    Tokens,
    Window,
    page_of_entries,
)

KINDS: tuple[LayerKind, ...] = ("csa", "hca")
OVERLAP: dict[LayerKind, int] = {"csa": 1, "hca": 0}  # Windows before that an entry is made of.


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Tensor `index` of a group of the layout."""

    group: int
    index: int


def deepseek_v4_layout(config: ModelConfig, page_tokens: int, dtype: str) -> Layout:
    """Groups "full", "window", "csa_tail", "csa_overlap" and "hca_tail", as far as there are
    layers for them.

    `dtype` is the pools' element type; gates with their bias are float32 whatever it is. Pages
    of the "full" group may have more tokens than `page_tokens`, so as to hold whole entries,
    and those of tails fewer. A page of the overlap is one window.
    """
    assert isinstance(config, DeepSeekV4Config)
    assert config.window is not None, "a configuration with window layers has a window"
    size, index_size = config.attention.key_size, config.indexer.head_size
    entries: list[TensorSpec] = []
    keys: list[TensorSpec] = []
    tails: dict[LayerKind, list[TensorSpec]] = {kind: [] for kind in KINDS}
    overlaps: dict[LayerKind, list[TensorSpec]] = {kind: [] for kind in KINDS}
    for layer, kind in enumerate(config.layer_kinds):
        keys.append(TensorSpec(f"keys.{layer}", layer, (size,), dtype))
        if kind == "window":
            continue
        sizes = {"": size}
        if kind == "csa":
            sizes["index_"] = index_size
        for prefix, width in sizes.items():
            ratio, shape = config.ratio_of(kind), (SERIES[kind], width)
            entries.append(
                TensorSpec(f"{prefix}entries.{layer}", layer, (width,), dtype, ratio)
            )
            tails[kind] += [
                TensorSpec(f"{prefix}rows.{layer}", layer, shape, dtype),
                TensorSpec(f"{prefix}gates.{layer}", layer, shape, dtype),
            ]
            if OVERLAP[kind]:
                window = (ratio, width)
                overlaps[kind] += [
                    TensorSpec(f"{prefix}overlap_rows.{layer}", layer, window, dtype, ratio),
                    TensorSpec(
                        f"{prefix}overlap_gates.{layer}", layer, window, "float32", ratio
                    ),
                ]
    page = Tokens(page_tokens)
    groups: list[Group] = []
    if entries:
        entry_page = page_of_entries(page, (spec.tokens_per_entry for spec in entries))
        groups.append(Group("full", All(), entry_page, tuple(entries)))
    groups.append(Group("window", Window(Tokens(config.window)), page, tuple(keys)))
    for kind in KINDS:
        if not tails[kind]:
            continue
        span = Tokens(config.ratio_of(kind))
        # Larger pages than a window would hold rows that nothing reads any more.
        tail_page = min(page, span)
        groups.append(Group(f"{kind}_tail", Tail(span, 0), tail_page, tuple(tails[kind])))
        if overlaps[kind]:
            reach = Tail(span, OVERLAP[kind])
            groups.append(Group(f"{kind}_overlap", reach, span, tuple(overlaps[kind])))
    return Layout(tuple(groups), swa_only_transfer=True)


def deepseek_v4_places(config: DeepSeekV4Config) -> dict[str, TensorPlace]:
    """The place of each tensor of the layout, by its name."""
    layout = deepseek_v4_layout(config, 1, "float32")
    return {
        spec.name: TensorPlace(number, index)
        for number, group in enumerate(layout.groups)
        for index, spec in enumerate(group.tensors)
    }
