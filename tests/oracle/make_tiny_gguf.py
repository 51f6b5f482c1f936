"""Writes a tiny Hugging Face folder anew as a GGUF file, in the conventions of such files."""

import json
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from safetensors import numpy as safetensors_numpy

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "smollm3": "smollm3",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
_LLAMA_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_GEMMA_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
GGUF_PARTS = {
    "llama": _LLAMA_PARTS,
    "smollm3": _LLAMA_PARTS,
    "qwen2": _LLAMA_PARTS,
    "qwen3": _LLAMA_PARTS,
    "gemma3": _GEMMA_PARTS,
    "gemma4": _GEMMA_PARTS
    | {
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
    },
}
GGUF_MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE_MODEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
# What divides the frequency of a pair that does not turn.
STILL_FACTOR = 1e30
CONTROL, NORMAL = 3, 1


def make_tiny_gguf(
    path: Path,
    folder: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    fields: dict[str, Any] | None = None,
) -> Path:
    """Write the float32 checkpoint in `folder`, from `make_tiny_checkpoint`, to `path`.

    Matrices are stored as `kind`, norms always as float32. `fields` adds or replaces fields,
    and leaves out those that are None. There is no chat template, as in a base model's file.
    """
    config = json.loads((folder / "config.json").read_text())
    family = ARCHITECTURES[config["model_type"]]
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer = gguf.GGUFWriter(path, family)
    for key, value in (_fields(config, family) | (fields or {})).items():
        if value is not None:
            _add(writer, key, value)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    texts = sorted(vocabulary, key=lambda text: vocabulary[text])
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_token_list(texts)
    writer.add_token_types([CONTROL if text in special else NORMAL for text in texts])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    # The ignore: safetensors leaves a parameter of its own open.
    tensors = safetensors_numpy.load_file(  # pyright: ignore[reportUnknownMemberType]
        folder / "model.safetensors"
    )
    for name, tensor in tensors.items():
        stored = _in_gguf_convention(name, tensor, config, family)
        gguf_name = _gguf_name(name, family)
        if stored.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name, stored)
        else:
            writer.add_tensor(gguf_name, gguf.quantize(stored, kind), raw_dtype=kind)
    factors = _rope_factors(config, family)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for layer in _sharing_layers(config):
        # The file holds keys and values of these layers too, as published folders do.
        for part in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
            writer.add_tensor(f"blk.{layer}.{part}", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _fields(config: dict[str, Any], family: str) -> dict[str, Any]:
    rope = config["rope_parameters"]
    own: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
    }
    scaled = rope["full_attention"] if family.startswith("gemma") else rope
    if scaled["rope_type"] == "linear":
        own["rope.scaling.type"] = "linear"
        own["rope.scaling.factor"] = float(scaled["factor"])
    if family == "gemma4":
        own |= _gemma4_fields(config)
    if family.startswith("gemma"):
        own["rope.freq_base"] = float(rope["full_attention"]["rope_theta"])
        own["attention.sliding_window"] = config["sliding_window"]
        own["attention.sliding_window_pattern"] = [
            layer_type == "sliding_attention" for layer_type in config["layer_types"]
        ]
    else:
        own["rope.freq_base"] = float(rope["rope_theta"])
    fields = {f"{family}.{key}": value for key, value in own.items()}
    fields |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.add_bos_token": family.startswith("gemma"),
    }
    if config["bos_token_id"] is not None:
        fields["tokenizer.ggml.bos_token_id"] = config["bos_token_id"]
    return fields


def _gemma4_fields(config: dict[str, Any]) -> dict[str, Any]:
    layers: dict[str, dict[str, int]] = config["per_layer_config"] or {}
    numbers = [str(layer) for layer in range(config["num_hidden_layers"])]
    own = [{**config, **layers.get(number, {})} for number in numbers]
    kinds: list[str] = config["layer_types"]
    full_size = own[kinds.index("full_attention")]["head_dim"]
    sharing = _sharing_layers(config)
    is_wide = bool(sharing) and config["use_double_wide_mlp"]
    inner = config["intermediate_size"]
    fields: dict[str, Any] = {
        "attention.key_length": full_size,
        "attention.value_length": full_size,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.head_count_kv": [layer["num_key_value_heads"] for layer in own],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.dimension_count": full_size,
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": float(
            config["rope_parameters"]["sliding_attention"]["rope_theta"]
        ),
    }
    if is_wide:
        fields["feed_forward_length"] = [
            inner * (2 if layer in sharing else 1) for layer in range(len(own))
        ]
    if config["final_logit_softcapping"] is not None:
        fields["final_logit_softcapping"] = float(config["final_logit_softcapping"])
    return fields


def _sharing_layers(config: dict[str, Any]) -> range:
    count: int = config["num_hidden_layers"]
    return range(count - config.get("num_kv_shared_layers", 0), count)


def _rope_factors(
    config: dict[str, Any], family: str
) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    if family == "gemma4":
        rope = config["rope_parameters"]["full_attention"]
        pairs = _gemma4_fields(config)["attention.key_length"] // 2
        turning = int(pairs * rope["partial_rotary_factor"])
        return np.array([1.0] * turning + [STILL_FACTOR] * (pairs - turning), np.float32)
    if family != "gemma3" and config["rope_parameters"]["rope_type"] == "llama3":
        return llama3_factors(config)
    return None


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, cast("list[bool] | list[int]", value))
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _gguf_name(name: str, family: str) -> str:
    if name in WHOLE_MODEL:
        return WHOLE_MODEL[name]
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    if part == "layer_scalar":
        return f"blk.{layer}.layer_output_scale.weight"
    module, _, kind = part.rpartition(".")
    return f"blk.{layer}.{(GGUF_MATRICES | GGUF_PARTS[family])[module]}.{kind}"


def llama3_factors(config: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What each pair's frequency is divided by, as writers of such files compute it."""
    rope: dict[str, float] = config["rope_parameters"]
    size: int = config["head_dim"]
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    factors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return np.asarray(factors, np.float32)


def _in_gguf_convention(
    name: str,
    tensor: np.ndarray[Any, np.dtype[np.float32]],
    config: dict[str, Any],
    family: str,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Gemma 3's norms with their 1 added; Llama's queries and keys with each head's halves
    interleaved."""
    if family == "gemma3" and tensor.ndim == 1:
        return tensor + np.float32(1)
    if family in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
        halves = tensor.reshape(-1, 2, config["head_dim"] // 2, *tensor.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
    return tensor
