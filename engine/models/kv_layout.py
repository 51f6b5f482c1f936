"""The KV layout of models whose layers attend to all positions or to a window."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.kvcache.layout import All, Group, Layout, Reach, TensorSpec, Tokens, Window


@dataclass(frozen=True, slots=True)
class KvPlace:
    """Where a layer's keys and values are: tensors `keys` and `values` of a group.

    A layer that does not own them reads those of an earlier layer and writes none.
    """

    group: int
    keys: int
    is_owner: bool

    @property
    def values(self) -> int:
        return self.keys + 1


def hybrid_layout(config: ModelConfig, page_tokens: int, dtype: str) -> Layout:
    """Group "full" for the full-attention layers, then "window" for the others; one may be
    missing. Layers that read the keys and values of an earlier one hold nothing.

    `dtype` is the name of the pool's element type, "bfloat16" or "float32".
    """
    full, window = _owners(config, False), _owners(config, True)
    groups: list[Group] = []
    if full:
        groups.append(attention_group("full", All(), full, config, page_tokens, dtype))
    if window:
        assert config.window is not None, "a configuration with window layers has a window"
        reach = Window(Tokens(config.window))
        groups.append(attention_group("window", reach, window, config, page_tokens, dtype))
    # A window layer's query reads keys and values of its window and nothing else that earlier
    # steps left behind. So decoding needs no page of the group below the window.
    return Layout(tuple(groups), swa_only_transfer=True if window else None)


def kv_places(config: ModelConfig) -> tuple[KvPlace, ...]:
    """For each layer its place in `hybrid_layout`."""
    full, window = _owners(config, False), _owners(config, True)
    places: list[KvPlace] = []
    for layer, is_window in enumerate(config.layer_is_window):
        owner = config.kv_owner(layer)
        owners = window if is_window else full
        assert owner in owners, "a layer reads what an earlier one of the same reach wrote"
        places.append(
            KvPlace(
                group=1 if is_window and full else 0,
                keys=2 * owners.index(owner),
                is_owner=owner == layer,
            )
        )
    return tuple(places)


def attention_group(
    name: str,
    reach: Reach,
    layers: Sequence[int],
    config: ModelConfig,
    page_tokens: int,
    dtype: str,
) -> Group:
    """A group with keys and values of `layers`: those of layers[i] are its tensors 2i, 2i + 1,
    of the shape [KV heads, key size] or [KV heads, value size].
    """
    tensors: list[TensorSpec] = []
    for layer in layers:
        heads = config.attention_of(layer)
        for kind, size in (("keys", heads.key_size), ("values", heads.value_size)):
            shape = (heads.kv_head_count, size)
            tensors.append(TensorSpec(f"{kind}.{layer}", layer, shape, dtype))
    return Group(name, reach, Tokens(page_tokens), tuple(tensors))


def _owners(config: ModelConfig, is_window: bool) -> list[int]:
    return [
        layer
        for layer, own in enumerate(config.layer_is_window)
        if own == is_window and config.kv_owner(layer) == layer
    ]
