"""The canonical names and shapes of a model's weights, and their names in GGUF files."""

from math import prod

from tidegate.engine.checkpoint.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_IN_LAYER_LLAMA = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_IN_LAYER_GEMMA3 = _IN_LAYER_LLAMA | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight that the model has, by canonical name, in the model's order.

    Matrices are [outputs, inputs]. The head is there only if it is not the embedding matrix.
    """
    hidden = (config.hidden_size,)
    query_size = config.head_count * config.head_dim
    key_size = config.kv_head_count * config.head_dim
    in_layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (query_size, config.hidden_size),
        "self_attn.k_proj": (key_size, config.hidden_size),
        "self_attn.v_proj": (key_size, config.hidden_size),
        "self_attn.o_proj": (config.hidden_size, query_size),
        "self_attn.q_norm": (config.head_dim,),
        "self_attn.k_norm": (config.head_dim,),
        "mlp.gate_proj": (config.intermediate_size, config.hidden_size),
        "mlp.up_proj": (config.intermediate_size, config.hidden_size),
        "mlp.down_proj": (config.hidden_size, config.intermediate_size),
    }
    embedding = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: embedding}
    for layer in range(config.layer_count):
        for part in _in_layer(config):
            shapes[_layer_name(layer, part)] = in_layer.get(part, hidden)
    shapes[FINAL_NORM] = hidden
    if not config.tie_embeddings:
        shapes[HEAD] = embedding
    return shapes


def has_float32(config: ModelConfig, shape: tuple[int, ...]) -> bool:
    """Whether a weight of this shape stays float32 whatever type the others are loaded in.

    Gemma's norms hold 1 + w, which bfloat16 would round.
    """
    return len(shape) == 1 and config.family == "gemma3"


def weight_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Bytes of all weights once they are loaded, with elements of this size."""
    return sum(
        prod(shape) * (4 if has_float32(config, shape) else element_bytes)
        for shape in weight_shapes(config).values()
    )


def gguf_names(config: ModelConfig) -> dict[str, str]:
    """The name in a GGUF file of every weight, by canonical name."""
    names = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight"}
    for layer in range(config.layer_count):
        for part, gguf_part in _in_layer(config).items():
            names[_layer_name(layer, part)] = f"blk.{layer}.{gguf_part}.weight"
    if not config.tie_embeddings:
        names[HEAD] = "output.weight"
    return names


def _in_layer(config: ModelConfig) -> dict[str, str]:
    return _IN_LAYER_GEMMA3 if config.family == "gemma3" else _IN_LAYER_LLAMA


def _layer_name(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}.weight"
