"""An inspection as people read it."""

from collections.abc import Sequence

from tidegate.cli.inspection import CapRefusal, GroupLayout, Inspection, TensorFacts
from tidegate.cli.plan_text import (
    flag_lines,
    longest_lines,
    pool_lines,
    shown_servers,
    warning_lines,
    wrapped,
)
from tidegate.cli.planning import WINDOW_CAP, Plan
from tidegate.clients.logs.words import bytes_text, columns, count_text

PAIR = 2


def render(found: Inspection) -> str:
    """For a terminal."""
    sections = [
        _title_lines(found),
        [line for note in found.notes for line in wrapped(f"note: {note}")],
        _layout_lines(found),
        _fixed_lines(found.groups),
        _declared_lines(found),
        _handoff_lines(found),
        *(_planned_sections(found, found.plan) if found.plan else [_hint_lines()]),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _title_lines(found: Inspection) -> list[str]:
    text = (
        f"{found.model}: {found.family} family, {found.layer_count} layers, context "
        f"{found.context:,} tokens, vocabulary {found.vocab_size:,}"
    )
    return wrapped(text if found.has_weights else f"{text}; a configuration without weights")


def _layout_lines(found: Inspection) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("pool", "layers", "a query reads", "a layer keeps", "bytes a token", "bytes a page")
    ]
    for group in found.groups:
        first, *others = _kept(group, found.dtype)
        rows.append(
            (
                group.pool,
                str(len(group.layers)),
                group.reads,
                first,
                f"{group.bytes_per_token:,}",
                f"{group.page_bytes:,}",
            )
        )
        rows += [("", "", "", other, "", "") for other in others]
    page_tokens = " and ".join(dict.fromkeys(str(group.page_tokens) for group in found.groups))
    lines = [f"in {found.dtype}, pages of {page_tokens} tokens"]
    lines += columns(rows, right=(1, 4, 5))
    for group in found.groups:
        noun = "layer" if len(group.layers) == 1 else "layers"
        lines += wrapped(f"Pool {group.pool} has {noun} {_numbers(group.layers)}.")
    if found.layers_without_kv:
        lines += wrapped(
            "What earlier layers keep is read, and nothing kept, by "
            f"{count_text(len(found.layers_without_kv), 'layer')}: "
            f"{_numbers(found.layers_without_kv)}."
        )
    return lines


def _kept(group: GroupLayout, dtype: str) -> list[str]:
    """What a layer keeps: in one line if it is only keys and values."""
    texts = [_tensor_text(tensor, group, dtype) for tensor in group.tensors]
    return [", ".join(texts)] if len(texts) <= PAIR else texts


def _tensor_text(tensor: TensorFacts, group: GroupLayout, dtype: str) -> str:
    text = f"{tensor.kind} {' x '.join(str(extent) for extent in tensor.shape)}"
    if tensor.dtype != dtype:
        text += f" {tensor.dtype}"
    if tensor.tokens_per_entry > 1:
        text += f" for each {tensor.tokens_per_entry} tokens"
    if tensor.layers != group.layers:
        text += f" ({count_text(len(tensor.layers), 'layer')})"
    return text


def _fixed_lines(groups: Sequence[GroupLayout]) -> list[str]:
    """What a request takes of pools that forget, to the byte and in whole pages."""
    kept = {group.pool: group.kept_bytes_max for group in groups}
    sizes = {pool: size for pool, size in kept.items() if size is not None}
    if not sizes:
        return []
    total = sum(sizes.values())
    subject = "Later tokens"
    if len(sizes) < len(groups):
        subject = f"Beside pool {groups[0].pool}, later tokens"
    pages = sum(group.kept_page_bytes_max or 0 for group in groups)
    parts = ", ".join(f"{size:,} of {pool}" for pool, size in sizes.items())
    counts = f"{total:,} bytes" if len(sizes) == 1 else f"{total:,} bytes ({parts})"
    return wrapped(
        f"{subject} read at most {bytes_text(total)} of a request, however long it is: "
        f"{counts}. In whole pages, with the token that is fed, that is at most "
        f"{bytes_text(pages)}."
    )


def _declared_lines(found: Inspection) -> list[str]:
    flag = found.swa_only_transfer
    shown = "does not apply" if flag is None else f"is {str(flag).lower()}"
    return wrapped(f"swa_only_transfer {shown}: {found.reason}.")


def _handoff_lines(found: Inspection) -> list[str]:
    """What the flag saves; for a model without a flag, what a hand-off takes."""
    if not found.handoffs:
        return []
    rows = [("a hand-off moves", *(f"{each.prompt:,} tokens" for each in found.handoffs))]
    declared = "all of it"
    if found.swa_only_transfer is not None:
        declared = f"swa_only_transfer {str(found.swa_only_transfer).lower()}"
    sizes = [bytes_text(each.bytes_as_declared) for each in found.handoffs]
    rows.append((declared, *sizes))
    if found.swa_only_transfer:
        whole = [each.bytes_if_false or 0 for each in found.handoffs]
        rows.append(("if it is forced to false", *map(bytes_text, whole)))
        ratios = [
            f"{size / each.bytes_as_declared:.1f} times"
            for size, each in zip(whole, found.handoffs, strict=True)
        ]
        rows.append(("", *ratios))
    return columns(rows, right=range(1, len(rows[0])))


def _planned_sections(found: Inspection, plan: Plan) -> list[list[str]]:
    is_as_declared = all(
        worker.swa_only_transfer == found.swa_only_transfer for worker in plan.workers
    )
    servers = shown_servers(plan)[:2]
    return [
        pool_lines(plan),
        [] if is_as_declared else flag_lines(plan.workers),
        warning_lines(plan.workers),
        longest_lines(servers),
        _refusal_lines(found.refused_by_window_cap) if len(servers) > 1 else [],
    ]


def _refusal_lines(refusals: Sequence[CapRefusal]) -> list[str]:
    if not refusals:
        return wrapped(
            f"A server whose prompts are {WINDOW_CAP} would refuse nothing that runs here."
        )
    lines: list[str] = []
    for each in refusals:
        plural = "token" if each.max_tokens == 1 else "tokens"
        lines += wrapped(
            f"A server whose prompts are {WINDOW_CAP} would refuse prompts of "
            f"{each.shortest:,} to {each.longest:,} tokens with {each.max_tokens:,} new "
            f"{plural}, which run here."
        )
    return lines


def _hint_lines() -> list[str]:
    return ["With --kv-memory SIZE: the pools, and the longest prompt."]


def _numbers(layers: Sequence[int]) -> str:
    """0-4, 6, 8-9."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
