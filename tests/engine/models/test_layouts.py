"""The table of families agrees with the layouts that it makes."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from fakes.tiny_model import WINDOW, tiny_config
from tidegate.engine.checkpoint.config import (
    FAMILIES,
    AttentionShape,
    Family,
    ModelConfig,
)
from tidegate.engine.checkpoint.families.llama import LlamaConfig
from tidegate.engine.checkpoint.rope import Rope
from tidegate.engine.models.kv_layout import hybrid_layout, kv_places
from tidegate.engine.models.layouts import (
    FAMILY_LAYOUTS,
    NO_WINDOW,
    flag_reason,
    layout_for,
)
from tidegate.kvcache.layout import All, Layout, LayoutError, Reach, Window

# Those whose layers read all positions or a window. What DeepSeek V4 keeps is more involved.
HYBRIDS = [family for family in FAMILIES if family != "deepseek_v4"]


def with_layers(family: Family, *layer_is_window: bool) -> ModelConfig:
    """A tiny model of the family with one layer for each argument."""
    has_window = any(layer_is_window)
    changes: dict[str, Any] = {"window": WINDOW if has_window else None}
    if family == "llama":
        changes["layer_has_rope"] = (True,) * len(layer_is_window)
    elif family in ("gemma3", "gemma4", "mimo_v2"):
        changes["rope_window"] = Rope(theta=1000.0, size=16) if has_window else None
    if family in ("gemma4", "mimo_v2"):
        heads = tiny_config(family).attention_of(0)
        changes["attention"] = (heads,) * len(layer_is_window)
    if family == "mimo_v2":
        changes |= {"layer_has_experts": (False,) * len(layer_is_window), "experts": None}
    return msgspec.structs.replace(
        tiny_config(family),
        layer_count=len(layer_is_window),
        layer_is_window=layer_is_window,
        **changes,
    )


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_general_terms_of_a_family_name_the_groups_that_it_makes(family: Family) -> None:
    layout = layout_for(with_layers(family, True, False, True), 16, "bfloat16")
    facts = FAMILY_LAYOUTS[family]
    tags: dict[type[Reach], str] = {All: "all", Window: "window"}
    assert [(terms.pool, terms.reach) for terms in facts.groups] == [
        (group.name, tags[type(group.reach)]) for group in layout.groups
    ]
    assert layout.swa_only_transfer is facts.swa_only_transfer is True
    assert flag_reason(family, layout) == facts.reason


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_model_without_window_layers_has_one_pool_and_another_reason(family: Family) -> None:
    layout = layout_for(with_layers(family, False, False), 16, "bfloat16")
    assert [group.name for group in layout.groups] == ["full"]
    assert layout.swa_only_transfer is None
    assert flag_reason(family, layout) == NO_WINDOW


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_model_of_window_layers_alone_has_no_full_pool(family: Family) -> None:
    config = with_layers(family, True, True)
    layout = layout_for(config, 16, "bfloat16")
    assert [group.name for group in layout.groups] == ["window"]
    assert layout.swa_only_transfer is True
    assert [(place.group, place.keys) for place in kv_places(config)] == [(0, 0), (0, 2)]


def test_each_layer_finds_its_own_tensors() -> None:
    config = with_layers("llama", True, False, True, False)
    layout = hybrid_layout(config, 16, "float32")
    for layer, place in enumerate(kv_places(config)):
        tensors = layout.groups[place.group].tensors
        names = [tensors[index].name for index in (place.keys, place.values)]
        assert names == [f"keys.{layer}", f"values.{layer}"]
        assert place.is_owner


class Sharing(LlamaConfig, frozen=True, kw_only=True):
    """The last layer of each kind reads what an earlier one wrote; values are narrower."""

    def attention_of(self, layer: int) -> AttentionShape:
        heads = 1 if self.layer_is_window[layer] else 2
        return AttentionShape(head_count=4, kv_head_count=heads, key_size=24, value_size=16)

    def kv_owner(self, layer: int) -> int:
        return {3: 0, 4: 1}.get(layer, layer)


def test_layers_of_other_sizes_and_those_that_hold_nothing_are_laid_out() -> None:
    base = with_layers("llama", True, False, True, True, False)
    config = Sharing(**msgspec.structs.asdict(base))
    layout = hybrid_layout(config, 16, "float32")
    assert [[(spec.name, spec.shape) for spec in group.tensors] for group in layout.groups] == [
        [("keys.1", (2, 24)), ("values.1", (2, 16))],
        [
            ("keys.0", (1, 24)),
            ("values.0", (1, 16)),
            ("keys.2", (1, 24)),
            ("values.2", (1, 16)),
        ],
    ]
    # Neither the full layer 4 nor the window layer 3 takes a byte of a page.
    assert [group.page_bytes for group in layout.groups] == [16 * 2 * 40 * 4, 16 * 2 * 40 * 4]
    places = [(place.group, place.keys, place.is_owner) for place in kv_places(config)]
    assert places == [
        (1, 0, True),
        (0, 0, True),
        (1, 2, True),
        (1, 0, False),
        (0, 0, False),
    ]


@pytest.mark.parametrize("flag", [False, None])
def test_a_layout_whose_flag_is_not_the_declared_one_does_not_load(
    flag: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(config: ModelConfig, page_tokens: int, dtype: str) -> Layout:
        return Layout(hybrid_layout(config, page_tokens, dtype).groups, flag)

    family = replace(FAMILY_LAYOUTS["gemma3"], layout=other)
    monkeypatch.setitem(FAMILY_LAYOUTS, "gemma3", family)
    with pytest.raises(LayoutError, match="swa_only_transfer"):
        layout_for(tiny_config("gemma3"), 16, "bfloat16")


def test_window_layers_without_a_window_group_do_not_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full_only(config: ModelConfig, page_tokens: int, dtype: str) -> Layout:
        return Layout(hybrid_layout(config, page_tokens, dtype).groups[:1], None)

    family = replace(FAMILY_LAYOUTS["gemma3"], layout=full_only)
    monkeypatch.setitem(FAMILY_LAYOUTS, "gemma3", family)
    with pytest.raises(LayoutError, match="is None, and the gemma3 family declares True"):
        layout_for(tiny_config("gemma3"), 16, "bfloat16")
