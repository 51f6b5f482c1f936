"""The table of families agrees with the layouts that it makes."""

from dataclasses import replace

import pytest

from fakes.tiny_model import tiny_config
from tidegate.engine.checkpoint.config import FAMILIES, Family, ModelConfig
from tidegate.engine.models.layouts import (
    FAMILY_LAYOUTS,
    flag_reason,
    gemma3_layout,
    layout_for,
    llama_layout,
)
from tidegate.kvcache.layout import All, Layout, LayoutError, Reach, Window


@pytest.mark.parametrize("family", FAMILIES)
def test_the_general_terms_of_a_family_name_the_groups_that_it_makes(family: Family) -> None:
    layout = layout_for(tiny_config(family), 16, "bfloat16")
    facts = FAMILY_LAYOUTS[family]
    tags: dict[type[Reach], str] = {All: "all", Window: "window"}
    assert [(terms.pool, terms.reach) for terms in facts.groups] == [
        (group.name, tags[type(group.reach)]) for group in layout.groups
    ]
    assert layout.swa_only_transfer == facts.swa_only_transfer
    assert flag_reason(family, layout) == facts.reason


def test_a_gemma_without_window_layers_has_another_reason() -> None:
    config = tiny_config("llama")
    layout = gemma3_layout(config, 16, "bfloat16")
    assert layout.swa_only_transfer is None
    assert "no layer has a window" in flag_reason("gemma3", layout)


@pytest.mark.parametrize("flag", [False, None])
def test_a_layout_whose_flag_is_not_the_declared_one_does_not_load(
    flag: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(config: ModelConfig, page_tokens: int, dtype: str) -> Layout:
        return Layout(gemma3_layout(config, page_tokens, dtype).groups, flag)

    family = replace(FAMILY_LAYOUTS["gemma3"], layout=other)
    monkeypatch.setitem(FAMILY_LAYOUTS, "gemma3", family)
    with pytest.raises(LayoutError, match="swa_only_transfer"):
        layout_for(tiny_config("gemma3"), 16, "bfloat16")


def test_window_layers_without_a_window_group_do_not_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = replace(FAMILY_LAYOUTS["gemma3"], layout=llama_layout)
    monkeypatch.setitem(FAMILY_LAYOUTS, "gemma3", family)
    with pytest.raises(LayoutError, match="is None, and the gemma3 family declares True"):
        layout_for(tiny_config("gemma3"), 16, "bfloat16")
