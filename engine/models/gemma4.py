"""Gemma 4 (text), dense and with experts: window layers between layers with full attention.

The two kinds have heads of other sizes and other rotations. The last layers may read the keys
and values of earlier ones; each layer may have an input of its own beside the residual.
"""

from dataclasses import dataclass

import torch

from tidegate.engine.attention import Scratch
from tidegate.engine.batch import Batch
from tidegate.engine.checkpoint.families.gemma4 import Gemma4Config
from tidegate.engine.models.gemma4_parts import (
    Attention,
    FeedForward,
    InputGate,
    Norm,
    TokenInputs,
)
from tidegate.engine.models.kv_layout import KvPlace, kv_places
from tidegate.engine.models.linear import Place
from tidegate.engine.models.parts import Embedding, Head, Weights, capped
from tidegate.engine.models.rotary import Rotary
from tidegate.kvcache.page_store import PageStore


@dataclass(frozen=True, slots=True)
class _Layer:
    is_window: bool
    input_norm: Norm
    attention: Attention
    output_norm: Norm
    feed_forward: FeedForward
    input_gate: InputGate | None
    scale: float  # What the residual is multiplied with at the layer's end.


class Gemma4:
    """Takes the weights out of `weights`, by canonical name, so as not to hold them twice."""

    def __init__(
        self, config: Gemma4Config, weights: Weights, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._config = config
        self._place = Place(device, dtype)
        self._scratch = Scratch()
        embedding = weights.pop("model.embed_tokens.weight")
        self._embedding = Embedding(embedding, config.embedding_scale, self._place)
        head = self._embedding.weight
        if not config.tie_embeddings:
            head = weights.pop("lm_head.weight")
        self._head = Head(head, self._place)
        self._token_inputs = None
        if config.per_layer_inputs is not None:
            self._token_inputs = TokenInputs(
                config, config.per_layer_inputs, weights, self._place
            )
        places = kv_places(config)
        self._first_sharing = next(
            (n for n, place in enumerate(places) if not place.is_owner), len(places)
        )
        self._layers = [self._take_layer(n, places[n], weights) for n in range(len(places))]
        self._norm = Norm(weights.pop("model.norm.weight"), config.norm_eps, self._place)
        self._full_rotary = Rotary(config.rope, device)
        # Without window layers nothing asks for their rotations.
        self._window_rotary = Rotary(config.rope_window or config.rope, device)

    @torch.inference_mode()
    def forward(self, batch: Batch, store: PageStore) -> torch.Tensor:
        """Logits [segments that sample, vocabulary], float32. Writes the launch's keys and
        values to `store`, whose layout is this model's. The next call overwrites the logits.
        """
        rotations = self._full_rotary(batch.positions), self._window_rotary(batch.positions)
        plans = batch.groups
        hidden = self._embedding(batch.tokens)
        if self._token_inputs is None:
            inputs = hidden[:, :0]
        else:
            inputs = self._token_inputs(batch.tokens, hidden)
        is_narrow = batch.sample_rows.shape[0] == batch.token_count
        for number, layer in enumerate(self._layers):
            if not is_narrow and number == self._first_sharing:
                # No layer from here on leaves anything to later steps.
                is_narrow = True
                hidden, inputs = _rows(hidden, batch), _rows(inputs, batch)
                if hidden.shape[0] == 0:
                    break
                rotations = _rows(rotations[0], batch), _rows(rotations[1], batch)
                plans = batch.groups_of_samples()
            attended = layer.attention(
                layer.input_norm(hidden),
                rotations[layer.is_window],
                plans,
                store,
                self._scratch,
            )
            if not is_narrow and layer is self._layers[-1]:
                # Nothing but the logits depends on what follows.
                hidden, inputs = _rows(hidden, batch), _rows(inputs, batch)
                attended = _rows(attended, batch)
            hidden.add_(layer.output_norm.fresh(layer.attention.output(attended)))
            hidden.add_(layer.feed_forward(hidden))
            if layer.input_gate is not None:
                hidden.add_(layer.input_gate(hidden, inputs[:, number]))
            hidden.mul_(layer.scale)
        return capped(self._head(self._norm(hidden)), self._config.logit_cap)

    def _take_layer(self, number: int, kv: KvPlace, weights: Weights) -> _Layer:
        config, place = self._config, self._place

        def take(name: str) -> torch.Tensor:
            return weights.pop(f"model.layers.{number}.{name}")

        def norm(name: str) -> Norm:
            return Norm(take(f"{name}.weight"), config.norm_eps, place)

        has_input = config.per_layer_inputs is not None
        return _Layer(
            is_window=config.layer_is_window[number],
            input_norm=norm("input_layernorm"),
            attention=Attention(config, number, kv, take, place),
            output_norm=norm("post_attention_layernorm"),
            feed_forward=FeedForward(config, take, place),
            input_gate=InputGate(config, take, place) if has_input else None,
            scale=float(take("layer_scalar")),
        )


def _rows(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Those of the tokens that are sampled."""
    return values.index_select(0, batch.sample_rows)
