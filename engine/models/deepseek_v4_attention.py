"""The attention of one DeepSeek V4 layer, of any of the three kinds."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from tidegate.engine.attention import Scratch
from tidegate.engine.batch import Batch
from tidegate.engine.checkpoint.families.deepseek_v4 import DeepSeekV4Config, LayerKind
from tidegate.engine.models.deepseek_v4_compressor import (
    Closings,
    Compressor,
    CompressorPlaces,
)
from tidegate.engine.models.deepseek_v4_indexer import Chooser, Indexer
from tidegate.engine.models.deepseek_v4_layout import OVERLAP, TensorPlace
from tidegate.engine.models.deepseek_v4_reading import Reader
from tidegate.engine.models.linear import Linear, Place
from tidegate.engine.models.parts import normalise
from tidegate.engine.models.rotary import Rotary, rotate
from tidegate.engine.models.running_softmax import RunningSoftmax
from tidegate.kvcache.page_store import PageStore

Take = Callable[[str], torch.Tensor]  # A layer's weight, by its name there.


@dataclass(frozen=True, slots=True)
class KindLaunch:
    """What all layers of one kind share in a launch.

    `rotation` is for the tokens' positions. A window layer has no `closings`. `must_choose`
    says whether any query sees more entries than a CSA layer lets it read.
    """

    rotation: torch.Tensor
    closings: Closings | None
    must_choose: bool

    @classmethod
    def of(
        cls,
        kind: LayerKind,
        config: DeepSeekV4Config,
        places: dict[str, TensorPlace],
        rotary: Rotary,
        batch: Batch,
    ) -> "KindLaunch":
        rotation = rotary(batch.positions)
        if kind == "window":
            return cls(rotation, None, False)
        layer = config.layer_kinds.index(kind)
        full = batch.segments[places[f"entries.{layer}"].group]
        tail = batch.segments[places[f"rows.{layer}"].group]
        overlap = None
        if OVERLAP[kind]:
            overlap = batch.segments[places[f"overlap_rows.{layer}"].group]
        ratio = config.ratio_of(kind)
        device = batch.positions.device
        closings = Closings.of_launch(tail, overlap, full, ratio, rotary, device)
        longest = int((full.starts + full.counts).max()) // ratio
        return cls(rotation, closings, longest > config.indexer.entry_count_max)


class Attention:
    """Takes the layer's weights by their names in it."""

    def __init__(
        self,
        config: DeepSeekV4Config,
        layer: int,
        places: dict[str, TensorPlace],
        take: Take,
        place: Place,
    ) -> None:
        self.kind: LayerKind = config.layer_kinds[layer]
        self._config, self._place = config, place

        def exact(name: str) -> torch.Tensor:
            return take(name).to(place.device)

        def compressor(name: str, kept: str) -> Compressor:
            return Compressor(
                exact(f"{name}.ape"),
                exact(f"{name}.norm.weight"),
                config.norm_eps,
                CompressorPlaces(
                    places[f"{kept}rows.{layer}"],
                    places[f"{kept}gates.{layer}"],
                    places[f"{kept}entries.{layer}"],
                    places.get(f"{kept}overlap_rows.{layer}"),
                    places.get(f"{kept}overlap_gates.{layer}"),
                ),
            )

        self._keys = places[f"keys.{layer}"]
        self._sinks = exact("attn.attn_sink")
        self._query_norm = exact("attn.q_norm.weight")
        self._key_norm = exact("attn.kv_norm.weight")
        self._query = Linear([take("attn.wq_b.weight")], place)
        # Outputs [groups, outputs, inputs] of the first of two projections.
        grouped = place.put(take("attn.wo_a.weight"))
        self._grouped = grouped.view(config.output_group_count, config.output_rank, -1)
        self._output = Linear([take("attn.wo_b.weight")], place)
        fused = [take("attn.wq_a.weight"), take("attn.wkv.weight")]
        gates: list[torch.Tensor] = []
        self._compressor = self._index_compressor = self._indexer = None
        if self.kind != "window":
            self._entries = places[f"entries.{layer}"]
            self._compressor = compressor("attn.compressor", "")
            fused.append(take("attn.compressor.wkv.weight"))
            gates.append(exact("attn.compressor.wgate.weight"))
        if self.kind == "csa":
            name = "attn.indexer"
            self._index_entries = places[f"index_entries.{layer}"]
            self._index_compressor = compressor(f"{name}.compressor", "index_")
            fused.append(take(f"{name}.compressor.wkv.weight"))
            gates.append(exact(f"{name}.compressor.wgate.weight"))
            gates.append(exact(f"{name}.weights_proj.weight"))
            query = Linear([take(f"{name}.wq_b.weight")], place)
            self._indexer = Indexer(query, config.indexer, place.dtype)
        self._fused = Linear(fused, place)
        self._fused_sizes = [weight.shape[0] for weight in fused]
        self._gates = torch.cat(gates) if gates else None
        self._gate_sizes = [weight.shape[0] for weight in gates]

    def __call__(
        self,
        inputs: torch.Tensor,
        launch: KindLaunch,
        batch: Batch,
        store: PageStore,
        scratch: Scratch,
    ) -> torch.Tensor:
        """What the heads read, before the output projections: [tokens, heads, size], float32.

        `inputs` [tokens, hidden] are float32. Writes all that the layer keeps of the tokens.
        """
        fused = self._fused(inputs.to(self._place.dtype))
        low_rank, keys, *rows = torch.split(fused, self._fused_sizes, 1)
        low_rank = self._normalised(low_rank, self._query_norm).to(self._place.dtype)
        queries = self._queries(low_rank, launch.rotation)
        self._write_keys(keys, launch.rotation, batch, store)
        chooser = self._compress(inputs, low_rank, rows, launch, batch, store)
        size = self._config.attention.key_size
        softmax = RunningSoftmax(self._sinks, batch.token_count, size)
        reader = Reader(softmax, queries, batch.positions, scratch)
        assert self._config.window is not None, "every layer has a window"
        pages = store.tensor(self._keys.group, self._keys.index)
        reader.read_window(batch.groups[self._keys.group], self._config.window, pages)
        if self.kind != "window":
            pages = store.tensor(self._entries.group, self._entries.index)
            ratio = self._config.ratio_of(self.kind)
            reader.read_entries(batch.groups[self._entries.group], ratio, pages, chooser)
        return softmax.result()

    def output(self, attended: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] from what the heads read at these rotations.

        Values turn with their position, as they are the keys; turning the result back leaves
        the distance.
        """
        rotate(self._turning(attended), rotation.conj())
        group_count, _, group_inputs = self._grouped.shape
        groups = attended.to(self._place.dtype).view(-1, group_count, group_inputs)
        low_rank = torch.bmm(groups.transpose(0, 1), self._grouped.transpose(1, 2))
        return self._output(low_rank.transpose(0, 1).flatten(1))

    def _queries(self, low_rank: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        heads = self._config.attention
        queries = self._query(low_rank).float().view(-1, heads.head_count, heads.key_size)
        queries = normalise(queries, self._config.norm_eps)
        rotate(self._turning(queries), rotation)
        return queries.mul_(heads.key_size**-0.5).to(self._place.dtype)

    def _write_keys(
        self, keys: torch.Tensor, rotation: torch.Tensor, batch: Batch, store: PageStore
    ) -> None:
        keys = self._normalised(keys, self._key_norm).unsqueeze(1)
        rotate(self._turning(keys), rotation)
        plan = batch.groups[self._keys.group]
        pages = store.tensor(self._keys.group, self._keys.index)
        pages[plan.write_pages, plan.write_slots] = keys.squeeze(1).to(pages.dtype)

    def _compress(
        self,
        inputs: torch.Tensor,
        low_rank: torch.Tensor,
        rows: list[torch.Tensor],
        launch: KindLaunch,
        batch: Batch,
        store: PageStore,
    ) -> Chooser | None:
        """Write rows, gates and the entries that are complete. Returns what chooses among the
        entries, if that is needed.
        """
        if self._compressor is None:
            return None
        assert self._gates is not None, "a layer with a compressor has gates"
        assert launch.closings is not None, "layers with a compressor share what closes"
        gates = torch.split(functional.linear(inputs, self._gates), self._gate_sizes, 1)
        plan = batch.groups[self._compressor.tail]
        self._compressor(rows[0], gates[0], plan, launch.closings, store)
        if self._index_compressor is None:
            return None
        assert self._indexer is not None, "a layer with index entries has an indexer"
        self._index_compressor(rows[1], gates[1], plan, launch.closings, store)
        if not launch.must_choose:
            return None
        pages = store.tensor(self._index_entries.group, self._index_entries.index)
        return self._indexer(low_rank, gates[2], launch.rotation, pages)

    def _turning(self, heads: torch.Tensor) -> torch.Tensor:
        """The numbers of each head that are rotated."""
        rope = self._config.rope_window if self.kind == "window" else self._config.rope
        return heads[..., heads.shape[-1] - rope.size :]

    def _normalised(self, vectors: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Float32."""
        return normalise(vectors.float(), self._config.norm_eps).mul_(weight)
