"""Tiny random models on poisoned pages against transformers, logits within 2e-4."""

import random
from typing import Any

import pytest
import torch

from fakes.paged_rows import Feed, PagedRow, PagedRows
from fakes.transformers_reference import Pair, pair
from oracle.make_tiny_checkpoint import VOCAB_SIZE, TinyFamily
from tidegate.engine.models.registry import layout_for

DIFFERENCE_MAX = 2e-4
PAGE_COUNT = 640

Overrides = tuple[tuple[str, Any], ...]

GQA: list[tuple[TinyFamily, Overrides]] = [
    ("llama", (("num_key_value_heads", 1),)),
    ("llama", (("num_key_value_heads", 2),)),
    ("llama", (("num_key_value_heads", 4), ("tie_word_embeddings", False))),
    ("gemma3", (("num_key_value_heads", 1),)),
    ("gemma3", (("num_key_value_heads", 2), ("query_pre_attn_scalar", 24))),
    ("gemma3", (("num_key_value_heads", 4), ("sliding_window", 16))),
]
# Smaller than a page, no multiple of it, one more than a multiple, and never reached.
WINDOWS: list[tuple[TinyFamily, Overrides]] = [
    ("gemma3", (("sliding_window", window),)) for window in (1, 2, 5, 17, 32, 300)
]
ALL_WINDOW: tuple[TinyFamily, Overrides] = (
    "gemma3",
    (("num_hidden_layers", 2), ("layer_types", ("sliding_attention",) * 2)),
)
ALL_FULL: tuple[TinyFamily, Overrides] = (
    "gemma3",
    (("num_hidden_layers", 2), ("layer_types", ("full_attention",) * 2)),
)
VARIANTS = [*GQA, *WINDOWS, ALL_WINDOW, ALL_FULL]
TYPICAL: list[tuple[TinyFamily, Overrides]] = [("llama", ()), ("gemma3", ())]


def name_of(value: Any) -> str:
    """A parameter's readable name: the family, or what is unlike the tiny model's default."""
    if isinstance(value, str):
        return value
    overrides: Overrides = value
    return ",".join(f"{field}={setting}" for field, setting in overrides) or "default"


def rows_of(models: Pair, page_tokens: int, seed: int = 0, device: str = "cpu") -> PagedRows:
    layout = layout_for(models.config, page_tokens, "float32")
    return PagedRows(models.model, layout, PAGE_COUNT, device=device, seed=seed)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert logits.shape == expected.shape
    difference = (logits - expected).abs().max().item()
    assert difference <= DIFFERENCE_MAX, difference  # Also false for NaN.


def prefill(rows: PagedRows, tokens: list[int]) -> PagedRow:
    row = rows.start()
    rows.launch([Feed(row, tokens, sample=False)])
    return row


@pytest.mark.parametrize("page_tokens", [1, 8, 16])
@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=name_of)
def test_a_whole_prefill_is_right_at_every_position(
    family: TinyFamily, overrides: Overrides, page_tokens: int
) -> None:
    models = pair(family, overrides)
    tokens = random_tokens(40)
    # Each launch holds prompts of several lengths, which end at different positions.
    logits: list[torch.Tensor] = []
    for first in range(1, 41, 8):
        rows = rows_of(models, page_tokens)
        logits.append(rows.launch([Feed(rows.start(), tokens[: first + n]) for n in range(8)]))
    assert_close(torch.cat(logits), models.expected(tokens))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=name_of)
def test_prefill_cut_into_random_chunks_is_right_at_each_cut(
    family: TinyFamily, overrides: Overrides, seed: int
) -> None:
    models = pair(family, overrides)
    chance = random.Random(seed)
    tokens = random_tokens(150, seed)
    cuts = sorted({*chance.sample(range(1, 150), chance.randint(1, 12)), 150})
    rows = rows_of(models, chance.choice([1, 8, 16]), seed)
    row = rows.start()
    logits = [rows.launch([Feed(row, tokens[row.length : cut])]) for cut in cuts]
    assert_close(torch.cat(logits), models.expected(tokens)[[cut - 1 for cut in cuts]])


@pytest.mark.parametrize("page_tokens", [1, 8, 16])
@pytest.mark.parametrize(("family", "overrides"), [*GQA, *WINDOWS[1:5]], ids=name_of)
def test_decoding_three_windows_is_right_at_every_position(
    family: TinyFamily, overrides: Overrides, page_tokens: int
) -> None:
    models = pair(family, overrides)
    steps = 3 * (models.config.window or 32)
    tokens = random_tokens(20 + steps)
    rows = rows_of(models, page_tokens)
    row = prefill(rows, tokens[:20])
    logits = [rows.launch([Feed(row, [token])]) for token in tokens[20:]]
    assert_close(torch.cat(logits), models.expected(tokens)[20:])


@pytest.mark.parametrize(("family", "overrides"), TYPICAL, ids=name_of)
def test_prefill_across_several_query_blocks_is_right(
    family: TinyFamily, overrides: Overrides
) -> None:
    models = pair(family, overrides)
    tokens = random_tokens(700)
    rows = rows_of(models, 16)
    row = rows.start()
    logits = [rows.launch([Feed(row, part)]) for part in (tokens[:301], tokens[301:])]
    assert_close(torch.cat(logits), models.expected(tokens)[[300, 699]])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("family", "overrides"), [*TYPICAL, ALL_WINDOW], ids=name_of)
def test_launches_that_mix_prefill_and_decode_are_right_for_each_row(
    family: TinyFamily, overrides: Overrides, seed: int
) -> None:
    models = pair(family, overrides)
    chance = random.Random(seed)
    rows = rows_of(models, chance.choice([1, 8, 16]), seed)
    texts = [random_tokens(chance.randint(30, 130), seed * 100 + n) for n in range(6)]
    expected = [models.expected(text) for text in texts]
    active = [rows.start() for _ in texts]
    launches = 0
    while any(row.length < len(text) for row, text in zip(active, texts, strict=True)):
        chosen = [
            n for n in range(6) if active[n].length < len(texts[n]) and chance.random() < 0.8
        ]
        chance.shuffle(chosen)
        if not chosen:
            continue
        feeds: list[Feed] = []
        wanted: list[torch.Tensor] = []
        for n in chosen:
            first = active[n].length
            count = 1 if first > 20 and chance.random() < 0.7 else chance.randint(1, 25)
            feeds.append(
                Feed(active[n], texts[n][first : first + count], chance.random() < 0.8)
            )
            if feeds[-1].sample:
                wanted.append(expected[n][first + len(feeds[-1].tokens) - 1])
        logits = rows.launch(feeds)
        launches += 1
        if wanted:
            assert_close(logits, torch.stack(wanted))
        else:
            assert logits.shape == (0, VOCAB_SIZE)
    assert launches > 5


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 90])
@pytest.mark.parametrize(("family", "overrides"), TYPICAL, ids=name_of)
def test_decoding_goes_on_elsewhere_from_the_pages_that_a_hand_off_moves(
    family: TinyFamily, overrides: Overrides, length: int
) -> None:
    models = pair(family, overrides)
    tokens = random_tokens(length + 100)
    source, target = rows_of(models, 8, seed=1), rows_of(models, 8, seed=2)
    other = prefill(target, random_tokens(60, seed=9))
    row = prefill(source, tokens[:length])
    moved = target.hand_off(row, source)
    assert target.held(moved) == source.held(row)
    for number, pages in enumerate(row.pages):
        source.store.poison(number, list(pages.values()))
    logits = [
        target.launch([Feed(other, [0], sample=False), Feed(moved, [token])])
        for token in tokens[length:]
    ]
    assert_close(torch.cat(logits), models.expected(tokens)[length:])


def test_window_pages_that_are_kept_below_the_window_change_nothing() -> None:
    models = pair("gemma3")
    tokens = random_tokens(120)
    layout = layout_for(models.config, 8, "float32").with_forced_flag(False)
    rows = PagedRows(models.model, layout, PAGE_COUNT)
    row = prefill(rows, tokens[:60])
    assert rows.held(row) == [8, 8]
    logits = [rows.launch([Feed(row, [token])]) for token in tokens[60:]]
    assert_close(torch.cat(logits), models.expected(tokens)[60:])


@pytest.mark.cuda
@pytest.mark.parametrize(("family", "overrides"), [*TYPICAL, ("gpt_oss", ())], ids=name_of)
def test_a_gpu_computes_the_same(family: TinyFamily, overrides: Overrides) -> None:
    models = pair(family, overrides, device="cuda")
    rows = rows_of(models, 8, device="cuda")
    tokens, other = random_tokens(120), random_tokens(50, seed=3)
    row, companion = rows.start(), rows.start()
    logits = [rows.launch([Feed(row, tokens[:70])])]
    logits.append(rows.launch([Feed(companion, other, sample=False), Feed(row, tokens[70:71])]))
    for n, token in enumerate(tokens[71:]):
        logits.append(rows.launch([Feed(row, [token]), Feed(companion, [other[n]])])[:1])
    assert_close(torch.cat(logits), models.expected(tokens)[69:])
