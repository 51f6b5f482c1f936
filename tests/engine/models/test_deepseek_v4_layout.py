"""What DeepSeek V4 keeps of a token: the groups, and the published model's sizes in bytes."""

import json
from typing import Any

import msgspec
import pytest

from tidegate.engine.checkpoint.config_from_hf import config_from_hf
from tidegate.engine.checkpoint.families.deepseek_v4 import DeepSeekV4Config, LayerKind
from tidegate.engine.models.deepseek_v4_layout import deepseek_v4_places
from tidegate.engine.models.layouts import FAMILY_LAYOUTS, flag_reason, layout_for
from tidegate.kvcache.demand import Leg, Lengths, floors
from tidegate.kvcache.layout import (
    All,
    Group,
    Layout,
    LayoutError,
    Reach,
    Tail,
    Tokens,
    Window,
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> DeepSeekV4Config:
    """The model that transformers' defaults describe: 43 layers."""
    folder = tmp_path_factory.mktemp("deepseek")
    fields = {"architectures": ["DeepseekV4ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(fields))
    config = config_from_hf(folder, "deepseek")
    assert isinstance(config, DeepSeekV4Config)
    return config


def with_kinds(config: DeepSeekV4Config, *kinds: LayerKind) -> DeepSeekV4Config:
    changes: dict[str, Any] = {
        "layer_count": len(kinds),
        "layer_kinds": kinds,
        "layer_is_window": tuple(kind == "window" for kind in kinds),
        "layer_has_table": (False,) * len(kinds),
    }
    return msgspec.structs.replace(config, **changes)


def groups_of(layout: Layout) -> dict[str, Group]:
    return {group.name: group for group in layout.groups}


def test_the_published_model_has_the_groups_that_the_family_declares(
    published: DeepSeekV4Config,
) -> None:
    layout = layout_for(published, 16, "bfloat16")
    facts = FAMILY_LAYOUTS["deepseek_v4"]
    tags: dict[type[Reach], str] = {All: "all", Window: "window", Tail: "tail"}
    assert [(terms.pool, terms.reach) for terms in facts.groups] == [
        (group.name, tags[type(group.reach)]) for group in layout.groups
    ]
    assert layout.swa_only_transfer is facts.swa_only_transfer is True
    assert flag_reason("deepseek_v4", layout) == facts.reason
    assert [group.reach for group in layout.groups] == [
        All(),
        Window(Tokens(128)),
        Tail(Tokens(4), 0),
        Tail(Tokens(4), 1),
        Tail(Tokens(128), 0),
    ]
    kinds = published.layer_kinds
    assert (kinds.count("hca"), kinds.count("csa"), kinds[:5]) == (
        23,
        20,
        ("hca", "hca", "hca", "csa", "hca"),
    )


@pytest.mark.parametrize("page_tokens", [16, 128, 256])
def test_the_published_model_keeps_6584_bytes_of_each_token(
    published: DeepSeekV4Config, page_tokens: int
) -> None:
    full = groups_of(layout_for(published, page_tokens, "bfloat16"))["full"]
    csa, hca = (512 + 128) * 2 / 4, 512 * 2 / 128
    assert 20 * csa + 23 * hca == 6584
    assert full.page_bytes == 6584 * full.page_tokens
    assert full.bytes_per_token == 6584


def test_the_published_model_keeps_besides_at_most_so_many_bytes_of_a_prompt(
    published: DeepSeekV4Config,
) -> None:
    groups = groups_of(layout_for(published, 16, "bfloat16"))
    most = {
        name: max(group.kept_bytes(Tokens(length)) for length in range(1000, 1300))
        for name, group in groups.items()
        if name != "full"
    }
    assert most == {
        # Of 43 layers the keys of 127 tokens, which the next token's query reads.
        "window": 43 * 127 * 512 * 2,
        # Of 20 layers three tokens, which do not make up a window yet: for compressor and
        # indexer, for this entry and the next, a row and its gates.
        "csa_tail": 20 * 3 * (512 + 128) * 2 * (2 + 2),
        # And of the window of 4 before, for the next entry alone. Its gates are float32.
        "csa_overlap": 20 * 4 * (512 + 128) * (2 + 4),
        # Of 23 layers 127 tokens, which do not make up a window yet.
        "hca_tail": 23 * 127 * 512 * (2 + 2),
    }
    assert most == {
        name: group.kept_bytes_max for name, group in groups.items() if name in most
    }
    assert sum(most.values()) == 12_188_672
    assert groups["full"].kept_bytes_max is None
    # All of it at once: where of both ratios a stretch lacks one token.
    end = Tokens(1023)
    assert {name: groups[name].kept_bytes(end) for name in most} == most


def test_gates_with_their_bias_are_float32_and_all_else_has_the_pools_type(
    published: DeepSeekV4Config,
) -> None:
    for dtype in ("bfloat16", "float32"):
        for group in layout_for(published, 16, dtype).groups:
            for spec in group.tensors:
                assert spec.dtype == ("float32" if "overlap_gates" in spec.name else dtype)


@pytest.mark.parametrize(
    ("kinds", "page_tokens", "expected"),
    [
        (("csa", "hca"), 16, 128),
        (("csa", "hca"), 128, 128),
        (("csa", "hca"), 200, 256),
        (("csa", "window"), 16, 16),
        (("csa",), 1, 4),
        (("csa",), 10, 12),
        (("hca",), 8, 128),
    ],
)
def test_a_page_of_the_full_pool_holds_whole_entries_of_its_layers(
    published: DeepSeekV4Config,
    kinds: tuple[LayerKind, ...],
    page_tokens: int,
    expected: int,
) -> None:
    layout = layout_for(with_kinds(published, *kinds), page_tokens, "bfloat16")
    pages = {
        "full": expected,
        "window": page_tokens,
        "csa_tail": min(page_tokens, 4),
        "csa_overlap": 4,
        "hca_tail": min(page_tokens, 128),
    }
    for group in layout.groups:
        assert group.page_tokens == pages[group.name]
        assert all(group.page_tokens % spec.tokens_per_entry == 0 for spec in group.tensors)


def test_pages_that_cannot_be_are_refused(published: DeepSeekV4Config) -> None:
    with pytest.raises(LayoutError, match="page_tokens of group 'full' must be 1 to 4096"):
        layout_for(published, 0, "bfloat16")
    with pytest.raises(LayoutError, match="page_tokens of group 'full' must be 1 to 4096"):
        layout_for(published, 4097, "bfloat16")


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        (("window", "window"), ["window"]),
        (("csa", "window"), ["full", "window", "csa_tail", "csa_overlap"]),
        (("hca",), ["full", "window", "hca_tail"]),
        (("hca", "csa"), ["full", "window", "csa_tail", "csa_overlap", "hca_tail"]),
    ],
)
def test_a_model_has_the_groups_that_its_layers_need(
    published: DeepSeekV4Config, kinds: tuple[LayerKind, ...], names: list[str]
) -> None:
    config = with_kinds(published, *kinds)
    layout = layout_for(config, 128, "bfloat16")
    assert [group.name for group in layout.groups] == names
    places = deepseek_v4_places(config)
    for name, place in places.items():
        assert layout.groups[place.group].tensors[place.index].name == name
    assert len(places) == sum(len(group.tensors) for group in layout.groups)


def test_where_a_window_closes_the_pending_rows_are_gone_and_the_overlap_stays(
    published: DeepSeekV4Config,
) -> None:
    groups = groups_of(layout_for(published, 16, "bfloat16"))
    csa, overlap, hca = (groups[name] for name in ("csa_tail", "csa_overlap", "hca_tail"))
    for length in (128, 256, 12_800):
        end = Tokens(length)
        for tail in (csa, hca):
            assert tail.first_needed(end) == length
            assert tail.kept_bytes(end) == tail.span(tail.first_needed(end), end) == 0
        assert overlap.first_needed(end) == length - 4
        assert overlap.span(overlap.first_needed(end), end) == 1
        assert overlap.kept_bytes(end) == 20 * 4 * 640 * 6
        assert hca.first_needed(Tokens(length - 1)) == length - 128


def test_a_long_prompt_needs_pages_of_the_full_pool_and_a_fixed_number_of_others(
    published: DeepSeekV4Config,
) -> None:
    layout = layout_for(published, 16, "bfloat16")
    for leg in (Leg.SOURCE, Leg.TARGET):
        needs = floors(layout, leg, Lengths(Tokens(100_000), Tokens(100)))
        full, *rest = needs
        assert full in (782, 783)
        assert rest == [9, 1, 2, 8]
