"""Layouts of the families, and models in bfloat16."""

import random

import pytest
import torch

from fakes.paged_rows import Feed, PagedRows
from fakes.transformers_reference import pair
from oracle.make_tiny_checkpoint import VOCAB_SIZE, TinyFamily
from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.models.registry import layout_for
from tidegate.kvcache.layout import All, LayoutError, Tokens, Window

FAMILIES: list[TinyFamily] = ["llama", "gemma3", "gpt_oss"]


def config_of(family: TinyFamily) -> ModelConfig:
    return pair(family).config


def test_a_llama_has_one_full_group_and_no_flag() -> None:
    layout = layout_for(config_of("llama"), 16, "bfloat16")
    (group,) = layout.groups
    assert (group.name, group.reach, group.page_tokens) == ("full", All(), 16)
    assert layout.swa_only_transfer is None
    assert group.page_bytes == 4 * 2 * 16 * 2 * 16 * 2  # Layers, K and V, slots, heads.


def test_gemma_has_a_full_and_a_window_group_and_declares_the_flag() -> None:
    config = config_of("gemma3")
    layout = layout_for(config, 8, "float32")
    full, window = layout.groups
    assert config.window == 32
    assert (full.name, full.reach) == ("full", All())
    assert (window.name, window.reach) == ("window", Window(Tokens(32)))
    assert layout.swa_only_transfer is True
    assert {spec.layer for spec in full.tensors} == {2}
    assert {spec.layer for spec in window.tensors} == {0, 1, 3, 4}
    assert [spec.name for spec in window.tensors[:3]] == ["keys.0", "values.0", "keys.1"]
    assert full.tensors[0].shape == (1, 32)


def test_gemma_with_layers_of_one_kind_has_one_group() -> None:
    full = pair("gemma3", (("num_hidden_layers", 1), ("layer_types", ("full_attention",))))
    layout = layout_for(full.config, 8, "float32")
    assert [group.name for group in layout.groups] == ["full"]
    assert layout.swa_only_transfer is None
    window = pair("gemma3", (("num_hidden_layers", 1), ("layer_types", ("sliding_attention",))))
    layout = layout_for(window.config, 8, "float32")
    assert [group.name for group in layout.groups] == ["window"]
    assert layout.swa_only_transfer is True


def test_pages_of_no_tokens_are_refused() -> None:
    with pytest.raises(LayoutError, match="page_tokens"):
        layout_for(config_of("llama"), 0, "float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_near_float32_whatever_the_launches(family: TinyFamily) -> None:
    # With all experts chosen: rounding may change which of two near ones is.
    overrides = (("num_experts_per_tok", 8),) if family == "gpt_oss" else ()
    models = pair(family, overrides, dtype="bfloat16")
    layout = layout_for(models.config, 8, "bfloat16")
    tokens = random.Random(5).choices(range(VOCAB_SIZE), k=120)
    expected = models.expected(tokens)
    rows = PagedRows(models.model, layout, 100)
    row, other = rows.start(), rows.start()
    logits = [rows.launch([Feed(row, tokens[:50])])]
    logits.append(
        rows.launch([Feed(other, tokens[:20], sample=False), Feed(row, tokens[50:80])])
    )
    for token in tokens[80:]:
        logits.append(rows.launch([Feed(row, [token]), Feed(other, [token])])[:1])
    wanted = expected[[49, *range(79, 120)]]
    error = (torch.cat(logits) - wanted).square().sum() / wanted.square().sum()
    assert error.sqrt() < 0.03


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rows_logits_do_not_depend_on_its_companions(family: TinyFamily) -> None:
    models = pair(family)
    layout = layout_for(models.config, 8, "float32")
    chance = random.Random(6)
    tokens = chance.choices(range(VOCAB_SIZE), k=90)
    alone, shared = (
        PagedRows(models.model, layout, 400),
        PagedRows(models.model, layout, 400, seed=1),
    )
    row, same_row = alone.start(), shared.start()
    companions = [shared.start() for _ in range(7)]
    feeds = [
        Feed(c, chance.choices(range(VOCAB_SIZE), k=7 * n + 1))
        for n, c in enumerate(companions)
    ]
    expected = [alone.launch([Feed(row, tokens[:60])])]
    logits = [shared.launch([*feeds, Feed(same_row, tokens[:60])])[-1:]]
    for token in tokens[60:]:
        expected.append(alone.launch([Feed(row, [token])]))
        feeds = [Feed(companion, [token]) for companion in companions]
        logits.append(shared.launch([*feeds, Feed(same_row, [token])])[-1:])
    assert (torch.cat(logits) - torch.cat(expected)).abs().max() < 2e-5
