"""ModelConfig from GGUF fields: the real files, what they leave unsaid, what is refused."""

from pathlib import Path

import msgspec
import pytest

from oracle.make_tiny_checkpoint import make_tiny_checkpoint
from oracle.make_tiny_gguf import make_tiny_gguf
from tidegate.engine.checkpoint.config import AttentionShape
from tidegate.engine.checkpoint.config_from_gguf import config_from_gguf
from tidegate.engine.checkpoint.config_from_hf import config_from_hf
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.gemma3 import Gemma3Config
from tidegate.engine.checkpoint.families.llama import LlamaConfig
from tidegate.engine.checkpoint.gguf_header import FieldValue, GgufHeader
from tidegate.engine.checkpoint.gguf_reader import read_gguf_header
from tidegate.engine.checkpoint.packaged_models import locate_gemma3_270m, locate_smollm2_135m
from tidegate.engine.checkpoint.rope import LinearScaling, Rope


@pytest.fixture(scope="module")
def gemma() -> GgufHeader:
    return read_gguf_header(locate_gemma3_270m())


@pytest.fixture(scope="module")
def smollm() -> GgufHeader:
    return read_gguf_header(locate_smollm2_135m())


def changed(header: GgufHeader, **fields: FieldValue | None) -> GgufHeader:
    """The header with fields replaced (dots written as two underscores), or gone if None."""
    merged = header.fields | {
        key.replace("__", "."): value for key, value in fields.items() if value is not None
    }
    for key, value in fields.items():
        if value is None:
            del merged[key.replace("__", ".")]
    return msgspec.structs.replace(header, fields=merged)


def test_gemma_3_270m_with_what_its_file_leaves_unsaid(gemma: GgufHeader) -> None:
    assert config_from_gguf(gemma, "gemma3-270m", is_chat=False) == Gemma3Config(
        name="gemma3-270m",
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        layer_count=18,
        attention=AttentionShape(head_count=4, kv_head_count=1, key_size=256, value_size=256),
        norm_eps=1e-6,
        rope=Rope(theta=1_000_000.0, size=256),
        rope_window=Rope(theta=10_000.0, size=256),
        window=512,
        layer_is_window=(True, True, True, True, True, False) * 3,
        query_scale=1 / 16,
        embedding_scale=640**0.5,
        tie_embeddings=True,
        context=32_768,
        bos_id=2,
        eos_ids=(1,),
    )


def test_smollm2_135m(smollm: GgufHeader) -> None:
    assert config_from_gguf(smollm, "smollm2-135m", is_chat=True) == LlamaConfig(
        name="smollm2-135m",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        layer_count=30,
        attention=AttentionShape(head_count=9, kv_head_count=3, key_size=64, value_size=64),
        norm_eps=1e-5,
        rope=Rope(theta=100_000.0, size=64),
        window=None,
        layer_is_window=(False,) * 30,
        layer_has_rope=(True,) * 30,
        has_query_key_norm=False,
        has_query_key_value_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        tie_embeddings=True,
        context=8192,
        bos_id=1,
        eos_ids=(2, 0),
    )


def test_the_end_of_a_turn_ends_a_generation_only_in_a_chat(
    gemma: GgufHeader, smollm: GgufHeader
) -> None:
    assert config_from_gguf(gemma, "m", is_chat=True).eos_ids == (1, 106)
    assert config_from_gguf(smollm, "m", is_chat=False).eos_ids == (2,)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_folder_and_the_same_model_as_a_gguf_file_give_equal_configurations(
    tmp_path: Path, family: str, is_tied: bool
) -> None:
    folder = make_tiny_checkpoint(
        tmp_path / "tiny",
        "gemma3" if family == "gemma3" else "llama",
        tie_word_embeddings=is_tied,
    )
    header = read_gguf_header(make_tiny_gguf(tmp_path / "tiny.gguf", folder))
    assert config_from_gguf(header, "m", is_chat=False) == config_from_hf(folder, "m")


def test_layers_are_as_the_file_says_if_it_does(gemma: GgufHeader) -> None:
    key = "gemma3__attention__sliding_window_pattern"
    interval = config_from_gguf(changed(gemma, **{key: 3}), "m", is_chat=False)
    assert interval.layer_is_window == (True, True, False) * 6
    listed = (False, True) * 9
    assert (
        config_from_gguf(changed(gemma, **{key: listed}), "m", False).layer_is_window == listed
    )
    none = config_from_gguf(changed(gemma, **{key: (False,) * 18}), "m", is_chat=False)
    assert isinstance(none, Gemma3Config)
    assert (none.window, none.rope_window) == (None, None)


def test_an_unknown_architecture_is_refused_with_the_known_families(
    gemma: GgufHeader,
) -> None:
    header = changed(gemma, general__architecture="mamba")
    known = "llama, qwen2, qwen3, smollm3, gemma3, gemma4"
    with pytest.raises(CheckpointError, match=rf"mamba is not supported.*: {known}"):
        config_from_gguf(header, "m", is_chat=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama__attention__value_length", 32),
        ("llama__rope__dimension_count", 32),
        ("llama__rope__scaling__type", "yarn"),
        ("llama__expert_count", 8),
        ("llama__final_logit_softcapping", 30.0),
        ("llama__block_count", 0),
        ("llama__block_count", 2**31),
        ("llama__attention__head_count", 0),
        ("llama__context_length", -5),
        ("llama__embedding_length", "wide"),
        ("llama__feed_forward_length", (1536, 1536)),
        ("llama__attention__layer_norm_rms_epsilon", None),
        ("llama__context_length", None),
        ("tokenizer__ggml__tokens", None),
        ("tokenizer__ggml__eos_token_id", None),
    ],
)
def test_unsupported_and_impossible_fields_are_refused_and_named(
    smollm: GgufHeader, key: str, value: FieldValue | None
) -> None:
    with pytest.raises(CheckpointError) as caught:
        config_from_gguf(changed(smollm, **{key: value}), "m", is_chat=False)
    assert f"{smollm.path}: field {key.replace('__', '.')} is " in str(caught.value)


def test_fields_that_may_be_absent_follow_from_others(smollm: GgufHeader) -> None:
    header = changed(smollm, llama__attention__head_count_kv=None, llama__rope__freq_base=None)
    config = config_from_gguf(header, "m", is_chat=False)
    assert isinstance(config, LlamaConfig)
    assert (config.attention.kv_head_count, config.attention.key_size) == (9, 64)
    assert config.rope.theta == 10_000.0


def test_what_the_fields_make_impossible_together_names_the_file(smollm: GgufHeader) -> None:
    header = changed(smollm, llama__attention__head_count_kv=2)
    with pytest.raises(
        CheckpointError, match=rf"{smollm.path}: head_count is 9.*kv_head_count"
    ):
        config_from_gguf(header, "m", is_chat=False)


def with_factors(header: GgufHeader, like: str) -> GgufHeader:
    """A header whose rotary factors are the bytes of another tensor."""
    tensors = header.tensors | {"rope_freqs.weight": header.tensors[like]}
    return msgspec.structs.replace(header, tensors=tensors)


def test_rotary_factors_that_do_not_fit_are_refused(smollm: GgufHeader) -> None:
    with pytest.raises(CheckpointError, match=r"tensor rope_freqs\.weight is of kind Q4_1"):
        config_from_gguf(with_factors(smollm, "blk.0.attn_q.weight"), "m", is_chat=False)
    with pytest.raises(CheckpointError, match="rope factors is 576 entries: must have one for"):
        config_from_gguf(with_factors(smollm, "blk.0.attn_norm.weight"), "m", is_chat=False)


@pytest.mark.parametrize("kind", ["linear", None])
def test_a_linear_factor_scales_the_rotation_of_the_full_layers(
    gemma: GgufHeader, kind: str | None
) -> None:
    fields: dict[str, FieldValue] = {"gemma3__rope__scaling__factor": 8.0}
    if kind is not None:
        fields["gemma3__rope__scaling__type"] = kind
    config = config_from_gguf(changed(gemma, **fields), "m", is_chat=False)
    assert isinstance(config, Gemma3Config)
    assert config.rope == Rope(theta=1e6, size=256, scaling=LinearScaling(8.0))
    assert config.rope_window == Rope(theta=1e4, size=256)


def test_the_largest_gemma_3_scales_scores_by_its_width(gemma: GgufHeader) -> None:
    fields = {
        "block_count": 62,
        "embedding_length": 5376,
        "attention.head_count": 32,
        "attention.head_count_kv": 16,
        "attention.key_length": 128,
        "attention.value_length": 128,
    }
    header = changed(gemma, **{f"gemma3.{key}": value for key, value in fields.items()})
    config = config_from_gguf(header, "m", is_chat=False)
    assert isinstance(config, Gemma3Config)
    assert config.query_scale == pytest.approx(168**-0.5)
