"""Paged attention of one layer: writes the launch's keys and values, then attends.

Only pages of positions from `first_needed` to the end are read. What lies in their slots that
no query may see has no effect: it may be NaN, since pages are not cleared.

Scores are matrix products with the softmax in float32. On a CPU without matrix units these
beat torch's fused attention clearly in bfloat16, and one path serves all devices.
"""

from functools import lru_cache
from math import prod

import torch

from tidegate.engine.attention_plan import DecodeBucket, GroupPlan, PrefillPiece
from tidegate.kvcache.layout import Reach, Window

# Rows of a block of scores (queries times the query heads of one key head). More rows waste
# work on keys that most of the block may not see, fewer make the products small.
SCORE_ROWS = {"cpu": 256, "cuda": 8192}
# Scores of a block. Where there are more keys, it has fewer rows.
SCORE_COUNT_MAX = {"cpu": 16 * 1024 * 1024, "cuda": 256 * 1024 * 1024}

# What the buffers of a `Scratch` hold.
KEYS, VALUES, PRODUCTS, SCORES = range(4)
# A buffer that has become too small grows by so much at least: contexts grow chunk by chunk.
BUFFER_GROWTH_MIN = 1.25


class Scratch:
    """Memory for what is large, kept from layer to layer: new memory costs page faults, which
    take longer than the arithmetic where contexts are long.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}

    def take(
        self, number: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Contiguous and uninitialised, in buffer `number`: valid until the next such call."""
        size = prod(shape)
        buffer = self._buffers.get(number)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
            old_size = 0 if buffer is None else buffer.numel()
            grown = max(size, int(old_size * BUFFER_GROWTH_MIN))
            # Before the new one is made: both at a time would be the most memory of all.
            self._buffers.pop(number, None)
            del buffer
            buffer = torch.empty(grown, dtype=dtype, device=device)
            self._buffers[number] = buffer
        return buffer[:size].view(shape)

    def gather(self, number: int, pages: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """`pages[ids]`, contiguous, in buffer `number`: valid until the next such call."""
        shape = (ids.shape[0], *pages.shape[1:])
        out = self.take(number, shape, pages.dtype, pages.device)
        return torch.index_select(pages, 0, ids, out=out)


def attend(
    plan: GroupPlan,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    scratch: Scratch,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one layer for all tokens of a launch.

    `queries` [tokens, heads, key size] are rotated and scaled; `keys` [tokens, key heads, key
    size] and `values` [tokens, key heads, value size] are stored into `key_pages` and
    `value_pages` [page_count, page_tokens, key heads, size]. `sinks` [heads], float32, are
    further scores of every query, whose weights add nothing. Returns
    [tokens, heads * value size].
    """
    key_pages[plan.write_pages, plan.write_slots] = keys
    value_pages[plan.write_pages, plan.write_slots] = values
    out = queries.new_empty(queries.shape[0], queries.shape[1], values.shape[2])
    _attend_decode(plan, queries, key_pages, value_pages, scratch, sinks, out)
    for piece in plan.prefill:
        part = slice(piece.first_token, piece.first_token + piece.count)
        piece_keys, piece_values = keys[part], values[part]
        if piece.first_key < piece.start:
            piece_keys, piece_values = _gather(piece, key_pages, value_pages, scratch)
        _prefill(
            piece,
            plan.reach,
            queries[part],
            piece_keys,
            piece_values,
            scratch,
            sinks,
            out[part],
        )
    return out.flatten(1)


def attend_stored(
    plan: GroupPlan,
    queries: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    scratch: Scratch,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend` with the keys and values that an earlier layer of the launch has stored."""
    out = queries.new_empty(queries.shape[0], queries.shape[1], value_pages.shape[3])
    _attend_decode(plan, queries, key_pages, value_pages, scratch, sinks, out)
    for piece in plan.prefill:
        part = slice(piece.first_token, piece.first_token + piece.count)
        keys, values = _gather(piece, key_pages, value_pages, scratch)
        _prefill(piece, plan.reach, queries[part], keys, values, scratch, sinks, out[part])
    return out.flatten(1)


def _attend_decode(
    plan: GroupPlan,
    queries: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    scratch: Scratch,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    for bucket in plan.decode:
        result = _decode(bucket, queries, key_pages, value_pages, scratch, sinks)
        out.index_copy_(0, bucket.rows, result)


def _gather(
    piece: PrefillPiece, key_pages: torch.Tensor, value_pages: torch.Tensor, scratch: Scratch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the positions that the segment reads: [positions, key heads, size]."""
    first, end = piece.skip, piece.skip + piece.end - piece.first_key
    keys = scratch.gather(KEYS, key_pages, piece.pages).flatten(0, 1)[first:end]
    values = scratch.gather(VALUES, value_pages, piece.pages).flatten(0, 1)[first:end]
    return keys, values


def _decode(
    bucket: DecodeBucket,
    queries: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    scratch: Scratch,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[B, heads, value size] for a bucket's B rows of one token each.

    All heads share one product over the keys of all key heads side by side, each query being
    zero outside its own key head: more arithmetic, but the gathered keys are read in place.
    """
    key_heads = key_pages.shape[2]
    count, heads = bucket.rows.shape[0], queries.shape[1]
    keys = scratch.gather(KEYS, key_pages, bucket.pages).flatten(0, 1).flatten(1)
    values = scratch.gather(VALUES, value_pages, bucket.pages).flatten(0, 1).flatten(1)
    # Zero, since NaN times a weight of zero is NaN.
    keys.index_fill_(0, bucket.unused, 0)
    values.index_fill_(0, bucket.unused, 0)
    chosen = queries.index_select(0, bucket.rows)
    if key_heads > 1:
        own = _own_key_head(heads, key_heads, queries.dtype, queries.device)
        chosen = (chosen.unsqueeze(2) * own).flatten(2)
    products = torch.bmm(chosen, keys.view(count, -1, keys.shape[1]).transpose(1, 2))
    scores = products.float().add_(bucket.mask)
    weights = _weights(scores, sinks).to(values.dtype)
    result = torch.bmm(weights, values.view(count, -1, values.shape[1]))
    if key_heads > 1:
        split = result.view(count, key_heads, heads // key_heads, key_heads, -1)
        result = split.diagonal(dim1=1, dim2=3).movedim(-1, 1).flatten(1, 2)
    return result


def _prefill(
    piece: PrefillPiece,
    reach: Reach,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scratch: Scratch,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Attention of one segment, in blocks of queries, each over the keys that it may see.

    `keys` and `values` hold the positions from `piece.first_key` to `piece.end`. So under
    a window cost grows linearly with the segment; scores take a bounded memory in any case.
    """
    key_heads = keys.shape[1]
    ratio = queries.shape[1] // key_heads
    size = _block_size(piece, reach, ratio, queries.device)
    ahead, behind = _edges(size, queries.device)
    by_key_head = queries.view(piece.count, key_heads, ratio, -1)
    out_by_key_head = out.view(piece.count, key_heads, ratio, -1)
    for head in range(key_heads):
        head_keys, head_values = keys[:, head].t(), values[:, head]
        own_sinks = None if sinks is None else sinks[head * ratio : (head + 1) * ratio]
        for first in range(0, piece.count, size):
            count = min(size, piece.count - first)
            # Both from here on count from `first_key`, where `keys` begins.
            position = piece.start + first - piece.first_key
            low, shift = 0, count
            if isinstance(reach, Window):
                low = max(0, position - reach.tokens + 1)
                shift = low - (position - reach.tokens + 1)
            high = position + count
            block = by_key_head[first : first + count, head].flatten(0, 1)
            shape = (count * ratio, high - low)
            products = scratch.take(PRODUCTS, shape, block.dtype, block.device)
            torch.mm(block, head_keys[:, low:high], out=products)
            flat = products
            if products.dtype is not torch.float32:
                flat = scratch.take(SCORES, shape, torch.float32, block.device).copy_(products)
            scores = flat.view(count, ratio, high - low)
            scores[:, :, -count:].add_(ahead[:count, :, :count])
            if shift < count:
                scores[:, :, : count - shift].add_(behind[:count, :, shift:count])
            if own_sinks is None:
                weights = torch.softmax(flat, -1, out=flat)
            else:
                weights = _weights(scores, own_sinks).flatten(0, 1)
            if weights.dtype is not values.dtype:
                weights = products.copy_(weights)
            result = torch.mm(weights, head_values[low:high])
            out_by_key_head[first : first + count, head] = result.view(count, ratio, -1)


def _block_size(piece: PrefillPiece, reach: Reach, ratio: int, device: torch.device) -> int:
    """Queries of a block: a power of two times fewer where it reads many keys."""
    keys = piece.end - piece.first_key
    rows = SCORE_ROWS[device.type]
    if isinstance(reach, Window):
        keys = min(keys, reach.tokens + rows)
    while rows * keys > SCORE_COUNT_MAX[device.type] and rows > ratio:
        rows //= 2
    return max(1, rows // ratio)


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The softmax over the last dimension of `scores` [rows, heads, keys], float32.

    The sinks [heads] are one more score of each row, which takes its share of the weights.
    """
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.view(1, -1, 1).expand(*scores.shape[:2], 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]


@lru_cache(maxsize=16)
def _edges(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks [size, 1, size] of a block of queries, -inf where query i may not look.

    The first is for the block's own positions: query i sees 0 to i. The second is for the
    positions that begin with the lowest one that query 0 sees: query i sees those from i on.
    """
    hidden = torch.full((size, size), -torch.inf, device=device)
    return hidden.triu(1).unsqueeze(1), hidden.tril(-1).unsqueeze(1)


@lru_cache(maxsize=16)
def _own_key_head(
    heads: int, key_heads: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[heads, key heads, 1]: 1 where the key head is the query head's own, 0 elsewhere."""
    own = torch.eye(key_heads, dtype=dtype, device=device)
    return own.repeat_interleave(heads // key_heads, 0).unsqueeze(2)
