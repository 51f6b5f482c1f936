"""DeepSeek V4: a window in every layer, compressed entries in most, experts in all.

The residual is several streams; see `hyper_connections.py`. What a layer keeps of a token is
told in `deepseek_v4_layout.py`.
"""

from dataclasses import dataclass

import torch

from tidegate.engine.attention import Scratch
from tidegate.engine.batch import Batch
from tidegate.engine.checkpoint.families.deepseek_v4 import DeepSeekV4Config
from tidegate.engine.models.deepseek_v4_attention import Attention, KindLaunch
from tidegate.engine.models.deepseek_v4_experts import RoutedMlp
from tidegate.engine.models.deepseek_v4_layout import deepseek_v4_places
from tidegate.engine.models.hyper_connections import StreamHead, StreamMixer, write
from tidegate.engine.models.linear import Place
from tidegate.engine.models.parts import Embedding, Head, Weights, normalise
from tidegate.engine.models.rotary import Rotary
from tidegate.kvcache.page_store import PageStore


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_mixer: StreamMixer
    attention_norm: torch.Tensor
    attention: Attention
    mlp_mixer: StreamMixer
    mlp_norm: torch.Tensor
    mlp: RoutedMlp


class DeepSeekV4:
    """Takes the weights out of `weights`, by canonical name, so as not to hold them twice."""

    def __init__(
        self,
        config: DeepSeekV4Config,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._place = Place(device, dtype)
        self._scratch = Scratch()
        self._places = deepseek_v4_places(config)
        self._embedding = Embedding(weights.pop("model.embed_tokens.weight"), 1.0, self._place)
        head = self._embedding.weight
        if not config.tie_embeddings:
            head = weights.pop("lm_head.weight")
        self._head = Head(head, self._place)
        self._layers = [self._take_layer(n, weights) for n in range(config.layer_count)]
        self._norm = weights.pop("model.norm.weight").to(device)
        weight, base, scale = (
            weights.pop(f"model.hc_head_{part}").to(device) for part in ("fn", "base", "scale")
        )
        self._stream_head = StreamHead(weight, base, scale, config.streams.eps, config.norm_eps)
        self._rotary = Rotary(config.rope, device)
        self._window_rotary = Rotary(config.rope_window, device)

    @torch.inference_mode()
    def forward(self, batch: Batch, store: PageStore) -> torch.Tensor:
        """Logits [segments that sample, vocabulary], float32. Writes all that later steps read
        to `store`, whose layout is this model's. The next call overwrites the logits.
        """
        launches = {
            kind: KindLaunch.of(
                kind,
                self._config,
                self._places,
                self._window_rotary if kind == "window" else self._rotary,
                batch,
            )
            for kind in dict.fromkeys(self._config.layer_kinds)
        }
        tokens = batch.tokens
        embedded = self._embedding(tokens).unsqueeze(1)
        streams = embedded.expand(-1, self._config.streams.count, -1).contiguous()
        for layer in self._layers:
            launch = launches[layer.attention.kind]
            rotation = launch.rotation
            collapsed, shares, mixing = layer.attention_mixer.read(streams)
            inputs = self._normalised(collapsed, layer.attention_norm)
            attended = layer.attention(inputs, launch, batch, store, self._scratch)
            if layer is self._layers[-1]:
                # Nothing but the logits depends on what follows.
                tokens, streams, shares, mixing, attended, rotation = (
                    values.index_select(0, batch.sample_rows)
                    for values in (tokens, streams, shares, mixing, attended, rotation)
                )
            output = layer.attention.output(attended, rotation)
            streams = write(streams, output.float(), shares, mixing)
            collapsed, shares, mixing = layer.mlp_mixer.read(streams)
            inputs = self._normalised(collapsed, layer.mlp_norm)
            streams = write(streams, layer.mlp(inputs, tokens), shares, mixing)
        vectors = self._normalised(self._stream_head(streams), self._norm)
        return self._head(vectors.to(self._place.dtype))

    def _normalised(self, vectors: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Float32."""
        return normalise(vectors, self._config.norm_eps).mul_(weight)

    def _take_layer(self, number: int, weights: Weights) -> _Layer:
        config, place = self._config, self._place

        def take(part: str) -> torch.Tensor:
            return weights.pop(f"model.layers.{number}.{part}")

        def exact(part: str) -> torch.Tensor:
            return take(part).to(place.device)

        def mixer(block: str) -> StreamMixer:
            weight, base, scale = (
                exact(f"hc_{block}_{part}") for part in ("fn", "base", "scale")
            )
            return StreamMixer(weight, base, scale, config.streams, config.norm_eps)

        return _Layer(
            attention_mixer=mixer("attn"),
            attention_norm=exact("attn_norm.weight"),
            attention=Attention(config, number, self._places, take, place),
            mlp_mixer=mixer("ffn"),
            mlp_norm=exact("ffn_norm.weight"),
            mlp=RoutedMlp(config.experts, config.layer_has_table[number], take, place),
        )
