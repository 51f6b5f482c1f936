"""ModelConfig from config.json: both generations of spellings, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from oracle.make_tiny_checkpoint import TinyFamily, make_tiny_checkpoint
from tidegate.engine.checkpoint.config import AttentionShape, ModelConfig
from tidegate.engine.checkpoint.config_from_hf import config_from_hf
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.gemma3 import Gemma3Config
from tidegate.engine.checkpoint.families.llama import LlamaConfig
from tidegate.engine.checkpoint.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[TinyFamily, dict[str, Any]]:
    """The content of each family's config.json, as transformers writes it."""
    folder = tmp_path_factory.mktemp("tiny")
    families: tuple[TinyFamily, ...] = ("llama", "gemma3")
    return {
        family: json.loads(
            (make_tiny_checkpoint(folder / family, family) / "config.json").read_text()
        )
        for family in families
    }


def config_of(
    folder: Path, content: dict[str, Any], generation: dict[str, Any] | None = None
) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(content))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return config_from_hf(folder, "m")


def llama_of(
    folder: Path, content: dict[str, Any], generation: dict[str, Any] | None = None
) -> LlamaConfig:
    config = config_of(folder, content, generation)
    assert isinstance(config, LlamaConfig)
    return config


def gemma3_of(folder: Path, content: dict[str, Any]) -> Gemma3Config:
    config = config_of(folder, content)
    assert isinstance(config, Gemma3Config)
    return config


def thetas(config: Gemma3Config) -> tuple[float, float]:
    assert config.rope_window is not None
    return config.rope.theta, config.rope_window.theta


def without(content: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in keys}


def test_the_fields_of_a_llama_folder(
    tmp_path: Path, tiny: dict[TinyFamily, dict[str, Any]]
) -> None:
    assert config_of(tmp_path, tiny["llama"]) == LlamaConfig(
        name="m",
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        layer_count=4,
        attention=AttentionShape(head_count=4, kv_head_count=2, key_size=16, value_size=16),
        norm_eps=1e-6,
        rope=Rope(theta=10_000.0, size=16),
        window=None,
        layer_is_window=(False,) * 4,
        layer_has_rope=(True,) * 4,
        has_query_key_norm=False,
        has_query_key_value_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        tie_embeddings=True,
        context=4096,
        bos_id=None,
        eos_ids=(2,),
    )


def test_the_fields_of_a_gemma3_folder(
    tmp_path: Path, tiny: dict[TinyFamily, dict[str, Any]]
) -> None:
    content = tiny["gemma3"] | {"query_pre_attn_scalar": 64}
    assert config_of(tmp_path, content) == Gemma3Config(
        name="m",
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        layer_count=5,
        attention=AttentionShape(head_count=4, kv_head_count=1, key_size=32, value_size=32),
        norm_eps=1e-6,
        rope=Rope(theta=1_000_000.0, size=32),
        rope_window=Rope(theta=10_000.0, size=32),
        window=32,
        layer_is_window=(True, True, False, True, True),
        query_scale=1 / 8,
        embedding_scale=8.0,
        tie_embeddings=True,
        context=4096,
        bos_id=2,
        eos_ids=(1,),
    )


def test_older_files_of_gemma3_spell_rope_and_layers_otherwise(
    tmp_path: Path, tiny: dict[TinyFamily, dict[str, Any]]
) -> None:
    bare = without(tiny["gemma3"], "rope_parameters", "layer_types", "_sliding_window_pattern")
    older = bare | {
        "rope_theta": 500_000,
        "rope_local_base_freq": 20_000,
        "rope_scaling": None,
        "sliding_window_pattern": 2,
    }
    config = gemma3_of(tmp_path, older)
    assert thetas(config) == (500_000.0, 20_000.0)
    assert config.layer_is_window == (True, False, True, False, True)
    underscored = without(older, "sliding_window_pattern") | {"_sliding_window_pattern": 3}
    pattern = config_of(tmp_path, underscored).layer_is_window
    assert pattern == (True, True, False, True, True)
    default = gemma3_of(tmp_path, bare | {"num_hidden_layers": 7})
    assert default.layer_is_window == (True, True, True, True, True, False, True)
    assert thetas(default) == (1_000_000.0, 10_000.0)


def test_newer_files_of_gemma3_name_rope_by_kind_of_layer(
    tmp_path: Path, tiny: dict[TinyFamily, dict[str, Any]]
) -> None:
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
    config = gemma3_of(tmp_path, tiny["gemma3"] | {"rope_parameters": rope})
    assert thetas(config) == (2e6, 3e4)


def test_older_files_of_llama_leave_much_to_defaults(
    tmp_path: Path, tiny: dict[TinyFamily, dict[str, Any]]
) -> None:
    bare = without(
        tiny["llama"],
        *("rope_parameters", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
        *("rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias"),
    )
    config = llama_of(tmp_path, bare)
    assert (config.attention.kv_head_count, config.attention.key_size) == (4, 16)
    assert config.rope.theta == 10_000.0
    assert not config.tie_embeddings
    assert llama_of(tmp_path, bare | {"rope_theta": 5e5}).rope.theta == 5e5
    assert config_of(tmp_path, bare | {"rope_scaling": {"type": "default"}}) == config


def test_scaled_rotations_come_with_the_defaults_of_their_kind(
    tmp_path: Path, tiny: dict[TinyFamily, dict[str, Any]]
) -> None:
    def scaling(**fields: Any) -> Any:
        rope = {"rope_theta": 5e5, **fields}
        return llama_of(tmp_path, tiny["llama"] | {"rope_parameters": rope}).rope.scaling

    assert scaling(rope_type="linear", factor=8.0) == LinearScaling(8.0)
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert scaling(rope_type="llama3", **llama3) == Llama3Scaling(
        factor=8.0, low_turns=1.0, high_turns=4.0, original_context=4096
    )
    yarn = YarnScaling(
        factor=4.0,
        original_context=1024,
        fast_turns=32.0,
        slow_turns=1.0,
        attention_factor=0.1 * math.log(4) + 1,
        truncate=True,
    )
    given = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    # Where no factor is given, it is the ratio of the two contexts.
    assert scaling(**given) == scaling(factor=4.0, **given) == yarn
    unlike = scaling(factor=4.0, attention_factor=1.5, truncate=False, **given)
    assert (unlike.attention_factor, unlike.truncate) == (1.5, False)
    weighed = scaling(factor=4.0, mscale=2.0, mscale_all_dim=1.0, **given)
    assert weighed.attention_factor == pytest.approx(
        (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)
    )


def test_older_files_have_rope_scaling_beside_the_base(
    tmp_path: Path, tiny: dict[TinyFamily, dict[str, Any]]
) -> None:
    older = without(tiny["llama"], "rope_parameters") | {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    rope = Rope(theta=5e5, size=16, scaling=LinearScaling(2.0))
    assert llama_of(tmp_path, older).rope == rope


def test_gemma3_scales_the_rotation_of_its_full_layers_only(
    tmp_path: Path, tiny: dict[TinyFamily, dict[str, Any]]
) -> None:
    older = without(tiny["gemma3"], "rope_parameters") | {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}
    }
    config = gemma3_of(tmp_path, older)
    assert config.rope == Rope(theta=1e6, size=32, scaling=LinearScaling(8.0))
    assert config.rope_window == Rope(theta=1e4, size=32)


def test_gemma3_that_sees_leaves_most_to_the_defaults(
    tmp_path: Path, tiny: dict[TinyFamily, dict[str, Any]]
) -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    content = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
    }
    config = gemma3_of(tmp_path, content)
    assert config.attention == AttentionShape(
        head_count=8, kv_head_count=4, key_size=256, value_size=256
    )
    assert config.rope == Rope(theta=1e6, size=256, scaling=LinearScaling(8.0))
    assert config.rope_window == Rope(theta=1e4, size=256)
    assert (config.vocab_size, config.context, config.window) == (262_208, 131_072, 1024)
    assert config.layer_is_window[:7] == (*[True] * 5, False, True)
    assert config.eos_ids == (1, 106)
    assert (config.query_scale, config.logit_cap) == (1 / 16, None)
    expected: dict[str, str | None] = {
        "language_model.model.norm.weight": "model.norm.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "model.language_model.norm.weight": "model.norm.weight",
        "vision_tower.vision_model.post_layernorm.weight": None,
        "multi_modal_projector.mm_soft_emb_norm.weight": None,
    }
    assert {name: config.canonical_name(name) for name in expected} == expected
    assert gemma3_of(tmp_path, tiny["gemma3"] | {"final_logit_softcapping": 30}).logit_cap == 30


def test_gemma3_without_window_layers_has_no_window(
    tmp_path: Path, tiny: dict[TinyFamily, dict[str, Any]]
) -> None:
    config = gemma3_of(tmp_path, tiny["gemma3"] | {"layer_types": ["full_attention"] * 5})
    assert (config.window, config.rope_window) == (None, None)


def test_generation_config_overrules_the_end_tokens(
    tmp_path: Path, tiny: dict[TinyFamily, dict[str, Any]]
) -> None:
    content = tiny["gemma3"] | {"eos_token_id": [1, 5]}
    assert config_of(tmp_path, content).eos_ids == (1, 5)
    assert config_of(tmp_path, content, {"eos_token_id": [5, 1, 5]}).eos_ids == (5, 1)
    assert config_of(tmp_path, content, {"temperature": 1.0}).eos_ids == (1, 5)


def test_an_unknown_architecture_is_refused_with_the_known_ones(
    tmp_path: Path, tiny: dict[TinyFamily, dict[str, Any]]
) -> None:
    for architectures in (["Gemma3ForSequenceClassification"], [], None):
        content = tiny["gemma3"] | {"architectures": architectures}
        with pytest.raises(CheckpointError) as caught:
            config_of(tmp_path, content)
        for known in ("LlamaForCausalLM", "Gemma3ForCausalLM", "gemma3"):
            assert known in str(caught.value)


@pytest.mark.parametrize(
    ("family", "field", "value", "named"),
    [
        ("llama", "hidden_act", "gelu", 'hidden_act is "gelu"'),
        ("llama", "quantization_config", {"bits": 4}, "quantization_config is "),
        ("llama", "rope_scaling", {"type": "dynamic"}, "rope_scaling has the type dynamic"),
        ("llama", "rope_scaling", {"type": "linear"}, "rope_scaling.factor is missing"),
        (
            "llama",
            "rope_scaling",
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
            "rope_scaling.high_freq_factor is missing",
        ),
        (
            "llama",
            "rope_parameters",
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "rope high_freq_factor is 4",
        ),
        (
            "llama",
            "rope_parameters",
            {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0},
            "rope beta_fast is 1",
        ),
        (
            "llama",
            "rope_parameters",
            {"type": "linear", "factor": -1},
            "rope factor is -1",
        ),
        (
            "llama",
            "rope_parameters",
            {"partial_rotary_factor": 1.5},
            "rope_parameters.partial_rotary_factor is 1.5",
        ),
        ("llama", "num_attention_heads", 0, "num_attention_heads is 0"),
        ("llama", "num_hidden_layers", 10**9, "num_hidden_layers is 1000000000"),
        ("llama", "num_key_value_heads", 3, "kv_head_count, which is 3"),
        ("llama", "head_dim", 0, "head_dim is 0"),
        ("llama", "hidden_size", "64", "$.hidden_size"),
        ("llama", "eos_token_id", None, "eos_ids"),
        ("llama", "eos_token_id", 384, "eos_ids is 384"),
        ("gemma3", "attention_bias", True, "attention_bias is true"),
        ("gemma3", "hidden_activation", "silu", 'hidden_activation is "silu"'),
        ("gemma3", "attn_logit_softcapping", 50.0, "attn_logit_softcapping is 50.0"),
        ("gemma3", "final_logit_softcapping", 0.0, "logit_cap is 0.0"),
        ("gemma3", "use_bidirectional_attention", True, "use_bidirectional_attention is true"),
        ("gemma3", "layer_types", ["chunked_attention"] * 5, "layer_types has chunked"),
        ("gemma3", "layer_types", ["full_attention"], "layer_is_window is 1 entries"),
        ("gemma3", "query_pre_attn_scalar", 0, "query_pre_attn_scalar is 0"),
        ("gemma3", "sliding_window", 0, "window is 0"),
        ("gemma3", "rope_parameters", {"rope_theta": 1e4}, "$.rope_parameters"),
        (
            "gemma3",
            "rope_parameters",
            {"full_attention": {"rope_type": "longrope", "factor": 8.0}},
            "rope_parameters.full_attention has the type longrope",
        ),
    ],
)
def test_unsupported_and_impossible_fields_are_refused_and_named(
    tmp_path: Path,
    tiny: dict[TinyFamily, dict[str, Any]],
    family: TinyFamily,
    field: str,
    value: object,
    named: str,
) -> None:
    with pytest.raises(CheckpointError) as caught:
        config_of(tmp_path, tiny[family] | {field: value})
    assert str(tmp_path / "config.json") in str(caught.value)
    assert named in str(caught.value)


def test_a_sliding_window_pattern_below_one_is_refused(
    tmp_path: Path, tiny: dict[TinyFamily, dict[str, Any]]
) -> None:
    content = without(tiny["gemma3"], "layer_types") | {"sliding_window_pattern": -1}
    with pytest.raises(CheckpointError, match="sliding_window_pattern is -1"):
        config_of(tmp_path, content)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "max_position_embeddings"])
def test_a_missing_size_is_named(
    tmp_path: Path, tiny: dict[TinyFamily, dict[str, Any]], field: str
) -> None:
    with pytest.raises(CheckpointError, match=field):
        config_of(tmp_path, without(tiny["llama"], field))


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read: No such file"):
        config_from_hf(tmp_path, "m")
    (tmp_path / "config.json").write_text("{'architectures'")
    with pytest.raises(CheckpointError, match=r"config\.json: .*malformed"):
        config_from_hf(tmp_path, "m")
