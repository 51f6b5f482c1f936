"""DeepSeek V4 through the checks of families: each kind of layer alone, and all together."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config

from fakes.family_checks import (
    CHECKS,
    check_bfloat16,
    check_hand_off,
    check_that_every_moved_page_is_needed,
    decode,
)
from fakes.paged_rows import Feed, PagedRow, PagedRows
from fakes.tiny_family import FamilyModels, TinyCase, is_close, load
from tidegate.kvcache.layout import Tokens

KINDS = {
    "w": "sliding_attention",
    "c": "compressed_sparse_attention",
    "h": "heavily_compressed_attention",
}
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "moe_intermediate_size": 12,
    "num_attention_heads": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 12,
    "o_groups": 2,
    "o_lora_rank": 6,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "hc_mult": 2,
    # With few heads several entries would have the score 0, and ties go either way.
    "index_n_heads": 64,
    "index_head_dim": 8,
    "max_position_embeddings": 4096,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 256,
}


def case(
    pattern: str, page_tokens: int, window: int, hca_ratio: int, top_k: int, **fields: Any
) -> TinyCase:
    own: dict[str, Any] = {
        "num_hidden_layers": len(pattern),
        "layer_types": [KINDS[letter] for letter in pattern],
        "compress_rates": {KINDS["c"]: 4, KINDS["h"]: hca_ratio},
        "sliding_window": window,
        "index_topk": top_k,
    }
    name = f"{pattern} window {window} ratio {hca_ratio} of {top_k} pages of {page_tokens}"
    sizes: dict[str, Any] = SIZES | own | fields
    # A stretch of CSA has pages of its own: at each length around one there are many of them.
    page_count = 10_000 if "c" in pattern and window > 100 else 3000
    return TinyCase(name, lambda: DeepseekV4Config(**sizes), page_tokens, page_count=page_count)


ALONE = {letter: case(letter, 4, 8, 16, 3) for letter in "wch"}
MIXED = case("hcw", 4, 8, 16, 3, rope_parameters=YARN, num_hash_layers=2, hc_mult=3)
CASES = [
    case("w", 8, 5, 16, 3),
    case("h", 4, 8, 16, 3, tie_word_embeddings=True),
    ALONE["c"],
    case("cc", 8, 3, 16, 1000, index_n_heads=2, swiglu_limit=0.3, scoring_func="sigmoid"),
    MIXED,
]
# The ratio and the window of the published models.
LARGE = [
    case("h", 16, 128, 128, 3),
    case("cw", 16, 128, 128, 7),
    # Of so many queries one has two entries whose scores differ in the last bit: it reads all.
    case("hchc", 16, 128, 128, 1000, rope_parameters=YARN),
]
# The two others take long, and have lengths of their own: see below.
LARGE_CHECKS = [
    check
    for check in CHECKS
    if check not in (check_hand_off, check_that_every_moved_page_is_needed)
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_family_is_as_its_layout_says(
    case: TinyCase, check: Callable[[FamilyModels], None]
) -> None:
    check(load(case))


@pytest.mark.slow
@pytest.mark.parametrize("check", LARGE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_the_published_ratios_and_windows_are_as_their_layout_says(
    case: TinyCase, check: Callable[[FamilyModels], None]
) -> None:
    check(load(case))


@pytest.mark.parametrize("case", [MIXED], ids=str)
def test_bfloat16_stays_near_float32(case: TinyCase) -> None:
    check_bfloat16(load(case, "bfloat16"))


@pytest.mark.cuda
@pytest.mark.parametrize("case", [MIXED], ids=str)
def test_a_gpu_stays_near_float32_in_bfloat16(case: TinyCase) -> None:
    check_bfloat16(load(case, "bfloat16", "cuda"))


def in_parts(lengths: range, size: int) -> list[range]:
    return [lengths[n : n + size] for n in range(0, len(lengths), size)]


# Every length up to a page past three windows.
SHORT_LENGTHS = range(1, 3 * 16 + 5)
LONG_LENGTHS = range(1, 3 * 128 + 17)


@pytest.mark.parametrize("lengths", in_parts(SHORT_LENGTHS, 18), ids=str)
def test_a_hand_off_at_every_length_moves_what_is_needed(lengths: range) -> None:
    check_hand_off(load(MIXED), lengths)


@pytest.mark.parametrize("lengths", in_parts(SHORT_LENGTHS, 18), ids=str)
def test_every_page_that_is_moved_is_needed_at_every_length(lengths: range) -> None:
    check_that_every_moved_page_is_needed(load(MIXED), lengths)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", in_parts(LONG_LENGTHS, 40), ids=str)
def test_a_hand_off_at_every_length_of_three_long_windows(lengths: range) -> None:
    check_hand_off(load(LARGE[2]), lengths)


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 14, 62, 124, 128, 190, 252, 256, 380, 384])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_every_page_that_is_moved_is_needed_around_long_windows(
    case: TinyCase, first: int
) -> None:
    check_that_every_moved_page_is_needed(load(case), range(first, first + 4))


def lost(
    rows: PagedRows, row: PagedRow, names: tuple[str, ...], positions: range | None = None
) -> None:
    """Put zeros in the place of what a row holds: of the tensors whose names begin so, all, or
    the entries of these positions.
    """
    for number, group in enumerate(rows.layout.groups):
        for index, spec in enumerate(group.tensors):
            if not spec.name.startswith(names):
                continue
            tensor = rows.store.tensor(number, index)
            size = spec.tokens_per_entry
            for position in range(row.length) if positions is None else positions:
                index_of_page = group.page_of(Tokens(position))
                page = row.pages[number].get(index_of_page)
                if page is not None:
                    within = position - group.start_of(index_of_page)
                    tensor[page, within // size] = 0


@pytest.mark.parametrize(
    ("pattern", "length", "names", "positions"),
    [
        pytest.param("c", 32, ("overlap_",), range(28, 29), id="the overlap of CSA"),
        pytest.param("c", 32, ("index_overlap_",), range(28, 29), id="the indexer's overlap"),
        pytest.param("c", 35, ("overlap_",), range(28, 29), id="the overlap within a stretch"),
        pytest.param("c", 32, ("overlap_gates",), range(28, 29), id="the overlap's gates"),
        pytest.param("c", 35, ("rows", "gates"), range(32, 35), id="the pending rows of CSA"),
        pytest.param("c", 35, ("gates",), range(32, 35), id="the pending gates of CSA"),
        pytest.param(
            "c",
            35,
            ("index_rows", "index_gates"),
            range(32, 35),
            id="the indexer's pending rows",
        ),
        pytest.param("h", 41, ("rows", "gates"), range(32, 41), id="the pending rows of HCA"),
        pytest.param("c", 33, ("index_entries",), None, id="the indexer's keys"),
        pytest.param("h", 33, ("entries",), range(16, 17), id="one entry of HCA"),
        pytest.param("c", 12, ("entries",), range(4, 5), id="one entry of CSA"),
        pytest.param("w", 20, ("keys",), range(15, 16), id="one key of the window"),
    ],
)
def test_a_hand_off_that_loses_a_part_gives_other_logits(
    pattern: str, length: int, names: tuple[str, ...], positions: range | None
) -> None:
    family = load(ALONE[pattern])
    tokens = family.tokens(length + 40, 3)
    source, target = family.pool(1), family.pool(2)
    row = source.start()
    source.launch([Feed(row, tokens[:length])])
    moved, damaged = (target.hand_off(row, source) for _ in range(2))
    lost(target, damaged, names, positions)
    found, other = decode(target, [moved, damaged], [tokens, tokens], 40)
    expected = family.expected(tokens)[length:]
    assert is_close(found, expected)
    assert other.isfinite().all()
    assert not is_close(other, expected)
    assert (other - expected).abs().max() > 1e-2


def test_scores_in_small_parts_choose_the_same_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    family = load(ALONE["c"])
    tokens = family.tokens(300, 4)
    expected = family.expected(tokens)
    for count in (1, 64 * 7, 64 * 100):
        monkeypatch.setattr(
            "tidegate.engine.models.deepseek_v4_indexer.PRODUCT_COUNT_MAX", {"cpu": count}
        )
        rows = family.pool(5)
        row = rows.start()
        logits = [rows.launch([Feed(row, tokens[:290])])]
        logits += [rows.launch([Feed(row, [token])]) for token in tokens[290:]]
        assert is_close(torch.cat(logits), expected[289:])
