"""The tensors of attention layers as a group of a KV layout."""

from collections.abc import Sequence

from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.kvcache.layout import Group, Reach, TensorSpec, Tokens


def attention_group(
    name: str,
    reach: Reach,
    layers: Sequence[int],
    config: ModelConfig,
    page_tokens: int,
    dtype: str,
) -> Group:
    """A group with keys and values of `layers`: those of layers[i] are its tensors 2i, 2i + 1.

    `dtype` is the name of the pool's element type, "bfloat16" or "float32".
    """
    shape = (config.kv_head_count, config.head_dim)
    return Group(
        name=name,
        reach=reach,
        page_tokens=Tokens(page_tokens),
        tensors=tuple(
            TensorSpec(f"{kind}.{layer}", layer, shape, dtype)
            for layer in layers
            for kind in ("keys", "values")
        ),
    )
