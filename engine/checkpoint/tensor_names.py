"""What the canonical names of all families' weights have in common, and their GGUF names."""

from collections.abc import Mapping, Sequence
from math import prod

from tidegate.engine.checkpoint.config import ModelConfig, Shapes

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
LAYERS = "model.layers"

_GGUF_OUTSIDE = {
    EMBEDDING: "token_embd.weight",
    FINAL_NORM: "output_norm.weight",
    HEAD: "output.weight",
}


def decoder_shapes(config: ModelConfig, layers: Sequence[Shapes]) -> Shapes:
    """Embedding, layers, final norm, and a head unless it is tied.

    `layers` hold the shapes of each layer's weights by their names within the layer, for
    example "self_attn.q_proj.weight".
    """
    embedding = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {EMBEDDING: embedding}
    for number, layer in enumerate(layers):
        for part, shape in layer.items():
            shapes[f"{LAYERS}.{number}.{part}"] = shape
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes[HEAD] = embedding
    return shapes


def decoder_gguf_names(
    config: ModelConfig, parts: Mapping[str, str], outside: Mapping[str, str] | None = None
) -> dict[str, str]:
    """GGUF names for the weights that `decoder_shapes` gives, and of those of `outside`, which
    are of no layer.

    `parts` holds the GGUF name of each module of a layer, without "weight" or "bias".
    """
    known = _GGUF_OUTSIDE | dict(outside or {})
    names: dict[str, str] = {}
    for name in config.weight_shapes():
        if name.startswith(LAYERS):
            number, _, part = name.removeprefix(f"{LAYERS}.").partition(".")
            module, _, kind = part.rpartition(".")
            if not module:  # A weight that is no module's has a name like a module.
                module, kind = part, "weight"
            names[name] = f"blk.{number}.{parts[module]}.{kind}"
        else:
            names[name] = known[name]
    return names


def weight_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Bytes of all weights once they are loaded, with elements of this size."""
    return sum(
        prod(shape) * _bytes_of(config, name, element_bytes)
        for name, shape in config.weight_shapes().items()
    )


def _bytes_of(config: ModelConfig, name: str, element_bytes: int) -> int:
    if config.is_integer(name):
        return 8
    return 4 if config.is_float32(name) else element_bytes
