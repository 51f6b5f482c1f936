"""The KV layouts of the model families, in one explicit table. Loads no torch."""

from collections.abc import Callable
from dataclasses import dataclass

from tidegate.engine.checkpoint.config import Family, ModelConfig
from tidegate.engine.models.deepseek_v4_layout import deepseek_v4_layout
from tidegate.engine.models.kv_layout import hybrid_layout
from tidegate.kvcache.layout import Layout, LayoutError

NO_WINDOW = "no layer has a window, so there is nothing to leave out"
WINDOW_ALONE = (
    "a window layer reads keys and values of its window, and nothing else that earlier steps "
    "left behind"
)
WINDOW_ALONE_SHARED = (
    "a window layer reads keys and values of its window, its own or an earlier layer's, and "
    "nothing else that earlier steps left behind; layers' inputs are made of the token alone"
)
WINDOW_AND_ENTRIES = (
    "a query reads the window's keys, which are the values too, and of earlier tokens nothing "
    "but compressed entries and the rows that the next ones are made of; sinks are weights"
)
KEYS_AND_VALUES = "2 x KV heads x head size x bytes of an element, for each layer"
KEYS_AND_NARROWER_VALUES = (
    "KV heads x (key size + value size) x bytes of an element, for each layer"
)


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """A group of a family in general terms, whatever the model's size."""

    pool: str
    reach: str  # "all", "window" or "tail", as the tags of `Reach`.
    layer_kind: str
    bytes_per_token_rule: str


@dataclass(frozen=True, slots=True)
class FamilyLayout:
    """What every model of a family has in common.

    `swa_only_transfer` is the flag of those that have window layers, and `reason` says why it
    may be so. A model may lack a group that has none of its layers.
    """

    layout: Callable[[ModelConfig, int, str], Layout]
    swa_only_transfer: bool | None
    reason: str
    groups: tuple[GroupTerms, ...]


def layout_for(config: ModelConfig, page_tokens: int, dtype: str) -> Layout:
    """The KV layout of a model whose pools hold elements of `dtype` ("bfloat16", "float32").

    Raises `LayoutError` if it cannot be served, for example with pages of 0 tokens, and if
    its flag is not the one that the family declares.
    """
    family = FAMILY_LAYOUTS[config.family]
    layout = family.layout(config, page_tokens, dtype)
    layout.check()
    declared = family.swa_only_transfer if config.has_window_layers else None
    if layout.swa_only_transfer != declared:
        raise LayoutError(
            f"swa_only_transfer of {config.name} is {layout.swa_only_transfer}, and the "
            f"{config.family} family declares {declared}"
        )
    return layout


def flag_reason(family: Family, layout: Layout) -> str:
    """Why `layout_for` gives this layout of the family the flag that it has."""
    if layout.swa_only_transfer is None:
        return NO_WINDOW
    return FAMILY_LAYOUTS[family].reason


_FULL_AND_WINDOW = (
    GroupTerms("full", "all", "full-attention layers", KEYS_AND_VALUES),
    GroupTerms("window", "window", "sliding-window layers", KEYS_AND_VALUES),
)

FAMILY_LAYOUTS: dict[Family, FamilyLayout] = {
    "deepseek_v4": FamilyLayout(
        deepseek_v4_layout,
        swa_only_transfer=True,
        reason=WINDOW_AND_ENTRIES,
        groups=(
            GroupTerms(
                "full",
                "all",
                "compressed entries of CSA and HCA layers, and CSA's index keys",
                "an entry's numbers x bytes of an element / tokens of an entry, for each layer",
            ),
            GroupTerms(
                "window",
                "window",
                "all layers",
                "head size x bytes of an element, for each layer",
            ),
            GroupTerms(
                "csa_tail",
                "tail",
                "rows and gates of CSA layers and their indexers that the next entry needs",
                "4 x (head size + index head size) x bytes of an element, for each layer",
            ),
            GroupTerms(
                "csa_overlap",
                "tail",
                "what a complete stretch of CSA layers leaves to the entry after its own",
                "(head size + index head size) x (bytes of an element + 4), for each layer",
            ),
            GroupTerms(
                "hca_tail",
                "tail",
                "rows and gates of HCA layers that the next entry needs",
                "2 x head size x bytes of an element, for each layer",
            ),
        ),
    ),
    "gemma3": FamilyLayout(
        hybrid_layout,
        swa_only_transfer=True,
        reason=WINDOW_ALONE,
        groups=_FULL_AND_WINDOW,
    ),
    "gemma4": FamilyLayout(
        hybrid_layout,
        swa_only_transfer=True,
        reason=WINDOW_ALONE_SHARED,
        groups=(
            GroupTerms(
                "full",
                "all",
                "full-attention layers, but those that share an earlier one's",
                KEYS_AND_VALUES,
            ),
            GroupTerms(
                "window",
                "window",
                "sliding-window layers, but those that share an earlier one's",
                KEYS_AND_VALUES,
            ),
        ),
    ),
    "gpt_oss": FamilyLayout(
        hybrid_layout,
        swa_only_transfer=True,
        # Sinks are weights: they are the same at every position, and no step leaves any.
        reason=f"{WINDOW_ALONE}; sinks are weights",
        groups=_FULL_AND_WINDOW,
    ),
    "llama": FamilyLayout(
        hybrid_layout,
        swa_only_transfer=True,
        reason=WINDOW_ALONE,
        groups=(
            GroupTerms("full", "all", "all layers but those with a window", KEYS_AND_VALUES),
            GroupTerms(
                "window",
                "window",
                "sliding-window layers, of Mistral all, of most others none",
                KEYS_AND_VALUES,
            ),
        ),
    ),
    "mimo_v2": FamilyLayout(
        hybrid_layout,
        swa_only_transfer=True,
        # Sinks, which window layers alone have, are weights; a router looks at one token.
        reason=f"{WINDOW_ALONE}; sinks are weights",
        groups=(
            GroupTerms("full", "all", "full-attention layers", KEYS_AND_NARROWER_VALUES),
            GroupTerms(
                "window",
                "window",
                "sliding-window layers, with KV heads of their own number",
                KEYS_AND_NARROWER_VALUES,
            ),
        ),
    ),
}
