"""Divides a worker's KV memory among its pools.

1. *Rolling* groups, whose old pages are given back, get the targets of `max_running` rows
   and of the chunks in flight, and a share on top for cached pages.
2. Where that is more than `ROLLING_SHARE_MAX` of the memory, they get less, but never less
   than one request's floor.
3. Every other byte goes to the groups that keep all of a request, which get pages for the
   same number of tokens.

Window groups keep all of a prompt when `swa_only_transfer` is false and there is a
hand-off; then they belong to step 3.
"""

from collections.abc import Callable, Sequence

import msgspec

from tidegate.kvcache.demand import Leg, Lengths, Pace, Phase, demand, floors
from tidegate.kvcache.geometry import geometry
from tidegate.kvcache.layout import All, Group, Layout, Pages, Tokens

CACHED_SHARE = 0.25  # Of a rolling group's targets, for window pages kept for reuse.
ROLLING_SHARE_MAX = 0.5  # Of the memory, for rolling groups that get their targets.
POOL_TOKENS_MAX = 2**40
PARTS = 1000  # Steps between a rolling group's floor and its target.


class SizeError(ValueError):
    """Not even one request fits. The text names the setting and says what would do."""


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the sizes depend on.

    `kv_memory` bounds the bytes of all pools together; without it `full_pool_tokens` has to
    be given, or `window_pool_tokens` for a model without a full pool. The two pool settings
    fix a pool's size in tokens, rounded up to whole pages. `legs` are those that the worker's
    role runs.
    """

    kv_memory: int | None
    full_pool_tokens: Tokens | None = None
    window_pool_tokens: Tokens | None = None
    max_running: int
    pace: Pace
    context: Tokens
    legs: tuple[Leg, ...]


class PoolSize(msgspec.Struct, frozen=True):
    """One pool, for people."""

    name: str
    page_tokens: Tokens
    page_count: Pages
    token_count: Tokens
    byte_count: int


class SizedPools(msgspec.Struct, frozen=True):
    """`page_counts` for each group in the layout's order; `warnings` are sentences."""

    page_counts: tuple[Pages, ...]
    warnings: tuple[str, ...]
    pools: tuple[PoolSize, ...]

    def table(self) -> str:
        """One line for each pool: tokens, pages and bytes."""
        lines = [
            f"{pool.name:<8} {pool.token_count:>10,} tokens  {pool.page_count:>8,} pages of "
            f"{pool.page_tokens}  {pool.byte_count / 2**20:>10,.1f} MiB"
            for pool in self.pools
        ]
        return "\n".join(lines)


def size_pools(layout: Layout, settings: PoolSettings) -> SizedPools:
    """Page counts whose geometry is at most `kv_memory` bytes, when that is given.

    Raises `SizeError` if one short request's floor does not fit, or a setting is missing.
    """
    _check_that_a_size_is_given(layout, settings)
    warnings: list[str] = []
    counts = _fixed_counts(layout, settings)
    least = _least_counts(layout, settings)
    _check_fixed(layout, settings, counts, least)
    _size_rolling(layout, settings, counts, least, warnings)
    _size_keeping(layout, settings, counts, least)
    sizes = tuple(count for count in counts if count is not None)
    assert len(sizes) == len(layout.groups)
    assert all(size >= floor for size, floor in zip(sizes, least, strict=True))
    _warn_short(layout, settings, sizes, warnings)
    return SizedPools(sizes, tuple(warnings), pool_sizes(layout, sizes))


def pool_sizes(layout: Layout, page_counts: Sequence[int]) -> tuple[PoolSize, ...]:
    """The pools as people read them."""
    return tuple(
        PoolSize(
            group.name,
            group.page_tokens,
            Pages(count),
            group.start_of(Pages(count)),
            count * group.page_bytes,
        )
        for group, count in zip(layout.groups, page_counts, strict=True)
    )


def longest_prompt(
    layout: Layout, page_counts: Sequence[int], leg: Leg, *, context: Tokens, output: int = 1
) -> Tokens:
    """The longest prompt whose `leg` fits these pools with `output` new tokens; 0 if none."""

    def fits(prompt: int) -> bool:
        lengths = Lengths(Tokens(prompt), Tokens(output))
        needs = floors(layout, leg, lengths)
        return all(need <= count for need, count in zip(needs, page_counts, strict=True))

    return Tokens(largest(fits, max(0, context + 1 - output)))


def keeps_all(layout: Layout, group: Group, legs: Sequence[Leg]) -> bool:
    """Does the group hold pages for all of a prompt at once, in some of these legs?"""
    if isinstance(group.reach, All):
        return True
    has_handoff = any(leg is not Leg.WHOLE for leg in legs)
    return layout.swa_only_transfer is False and has_handoff and group.is_window


def _check_that_a_size_is_given(layout: Layout, settings: PoolSettings) -> None:
    has_full = any(isinstance(group.reach, All) for group in layout.groups)
    given = settings.full_pool_tokens if has_full else settings.window_pool_tokens
    if settings.kv_memory is None and given is None:
        option = "--full-pool-tokens" if has_full else "--window-pool-tokens"
        raise SizeError(f"the pools need a size: give --kv-memory or {option}")


def _fixed_counts(layout: Layout, settings: PoolSettings) -> list[Pages | None]:
    """The page counts that the settings fix, None for the others."""
    counts: list[Pages | None] = []
    for group in layout.groups:
        tokens = settings.window_pool_tokens if group.is_window else None
        if isinstance(group.reach, All):
            tokens = settings.full_pool_tokens
        counts.append(None if tokens is None else group.pages(tokens))
    return counts


def _least_counts(layout: Layout, settings: PoolSettings) -> tuple[Pages, ...]:
    """One request's floor: rolling groups as for the longest one, the others for a short one.

    So what the full pool holds is all that bounds a prompt, if the flag is true.
    """
    short = Lengths(Tokens(1), Tokens(min(2, settings.context)))
    long = Lengths(settings.context, Tokens(1))
    least: list[Pages] = []
    for index, group in enumerate(layout.groups):
        lengths = short if keeps_all(layout, group, settings.legs) else long
        least.append(max(floors(layout, leg, lengths)[index] for leg in settings.legs))
    return tuple(least)


def _check_fixed(
    layout: Layout,
    settings: PoolSettings,
    counts: Sequence[Pages | None],
    least: Sequence[Pages],
) -> None:
    for group, count, floor in zip(layout.groups, counts, least, strict=True):
        if count is not None and count < floor:
            option = "--window-pool-tokens" if group.is_window else "--full-pool-tokens"
            raise SizeError(
                f"{option}: {group.start_of(count)} tokens are {count} pages, and one request "
                f"needs {floor}: give at least {group.start_of(floor)}"
            )
    if settings.kv_memory is None:
        return
    smallest = [
        floor if count is None else count for count, floor in zip(counts, least, strict=True)
    ]
    needed = geometry(layout, smallest).byte_count
    if needed > settings.kv_memory:
        sized = "one request" if counts == [None] * len(counts) else "these pool sizes"
        raise SizeError(
            f"--kv-memory: {settings.kv_memory} bytes do not hold {sized}: "
            f"give at least {needed}"
        )


def _size_rolling(
    layout: Layout,
    settings: PoolSettings,
    counts: list[Pages | None],
    least: Sequence[Pages],
    warnings: list[str],
) -> None:
    """Fill in the rolling groups: their targets, or as much of them as there is memory for."""
    rolling = [
        index
        for index, group in enumerate(layout.groups)
        if counts[index] is None and not keeps_all(layout, group, settings.legs)
    ]
    targets = {index: _target(layout.groups[index], settings) for index in rolling}

    def at(part: int) -> dict[int, Pages]:
        """Sizes `part` of `PARTS` of the way from the floors to the targets."""
        return {
            index: Pages(least[index] + max(0, targets[index] - least[index]) * part // PARTS)
            for index in rolling
        }

    def fits(part: int) -> bool:
        if settings.kv_memory is None:
            return True
        sizes = at(part)
        own = sum(layout.groups[index].page_bytes * size for index, size in sizes.items())
        filled = [
            sizes.get(index, floor if count is None else count)
            for index, (count, floor) in enumerate(zip(counts, least, strict=True))
        ]
        has_room = geometry(layout, filled).byte_count <= settings.kv_memory
        # With the full pool fixed nothing else wants the memory.
        is_bounded = any(count is None and i not in sizes for i, count in enumerate(counts))
        return has_room and (not is_bounded or own <= ROLLING_SHARE_MAX * settings.kv_memory)

    part = largest(fits, PARTS)
    for index, size in at(part).items():
        counts[index] = size
        if part < PARTS:
            group = layout.groups[index]
            warnings.append(
                f"the {group.name} pool has {size} pages, and {settings.max_running} running "
                f"requests at full speed use {targets[index]}: raise --kv-memory, or lower "
                "--max-running or --chunk-tokens"
            )


def _size_keeping(
    layout: Layout,
    settings: PoolSettings,
    counts: list[Pages | None],
    least: Sequence[Pages],
) -> None:
    """Fill in the rest: pages for as many tokens as the memory holds, in every group."""
    rest = [index for index, count in enumerate(counts) if count is None]
    if not rest:
        return

    def at(tokens: int) -> list[Pages]:
        return [
            max(least[index], layout.groups[index].pages(Tokens(tokens)))
            if count is None
            else count
            for index, count in enumerate(counts)
        ]

    if settings.kv_memory is None:
        # The full pool is fixed: a window pool that keeps whole prompts gets as many tokens.
        assert settings.full_pool_tokens is not None
        counts[:] = at(settings.full_pool_tokens)
        return
    memory = settings.kv_memory
    tokens_max = POOL_TOKENS_MAX
    if settings.full_pool_tokens is not None:
        tokens_max = settings.full_pool_tokens
    counts[:] = at(
        largest(lambda tokens: geometry(layout, at(tokens)).byte_count <= memory, tokens_max)
    )


def _target(group: Group, settings: PoolSettings) -> Pages:
    lengths = Lengths(settings.context, Tokens(1))

    def target(phase: Phase) -> Pages:
        return demand(group, phase, lengths, settings.pace, whole_prompt=False).target

    row = max(target(Phase.HANDOFF), target(Phase.DECODE))
    chunks = settings.pace.chunks_in_flight * target(Phase.PREFILL)
    used = settings.max_running * row + chunks
    return Pages(used + int(used * CACHED_SHARE))


def _warn_short(
    layout: Layout, settings: PoolSettings, sizes: Sequence[Pages], warnings: list[str]
) -> None:
    longest_of = {
        leg: longest_prompt(layout, sizes, leg, context=settings.context)
        for leg in settings.legs
    }
    leg = min(settings.legs, key=lambda leg: longest_of[leg])
    longest = longest_of[leg]
    if longest < settings.context:
        needs = floors(layout, leg, Lengths(Tokens(longest + 1), Tokens(1)))
        option = next(
            _option_for(group, settings)
            for group, need, size in zip(layout.groups, needs, sizes, strict=True)
            if need > size
        )
        warnings.append(
            f"prompts of up to {longest} tokens fit the pools, and the model's context is "
            f"{settings.context}: raise {option} for longer ones"
        )


def _option_for(group: Group, settings: PoolSettings) -> str:
    """The option that makes this group's pool larger."""
    if group.is_window and settings.window_pool_tokens is not None:
        return "--window-pool-tokens"
    if isinstance(group.reach, All) and settings.full_pool_tokens is not None:
        return "--full-pool-tokens"
    return "--kv-memory"


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest value in [0, most] that fits, where all below one that fits fit too.

    0 if none does.
    """
    low, beyond = 0, most + 1
    while beyond - low > 1:
        middle = (low + beyond) // 2
        if fits(middle):
            low = middle
        else:
            beyond = middle
    return low
