"""Row tables of a small hybrid layout, and the operations to fill them with."""

from tidegate.engine.rows import RowOperation, RowTable
from tidegate.ipc.protocol import PageRun, RequestId, Row, Sampling, Start, pack_ids
from tidegate.kvcache.layout import All, Group, Layout, Tokens, Window

PAGE = 4
WINDOW = 6
EOS = 99
LAYOUT = Layout(
    groups=(
        Group("full", All(), Tokens(PAGE), ()),
        Group("window", Window(Tokens(WINDOW)), Tokens(PAGE), ()),
    ),
    swa_only_transfer=True,
)


def make_table(row_count: int = 8) -> RowTable:
    return RowTable(LAYOUT, (64, 32), row_count, vocab_size=100, eos_ids=(EOS,))


def make_start(
    row: int = 0,
    *,
    position: int = 0,
    tokens: tuple[int, ...] = (1, 2, 3, 4, 5),
    output_index: int = 0,
    limit: int = 20,
    full: tuple[int, ...] = (10, 11),
    window: tuple[int, ...] = (20, 21),
    window_from: int = 0,
    stop_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
) -> Start:
    return Start(
        row=Row(row),
        request_id=RequestId(f"request-{row}"),
        position=position,
        tokens=pack_ids(tokens),
        output_index=output_index,
        limit=limit,
        pages=(PageRun(0, pack_ids(full)), PageRun(window_from, pack_ids(window))),
        sampling=Sampling(),
        stop_ids=pack_ids(stop_ids),
        ignore_eos=ignore_eos,
    )


def decoding_start(row: int = 0, **changes: int) -> Start:
    """A row after a hand-off at length 5, with its first token to feed."""
    limit = changes.get("limit", 20)
    return make_start(row, position=5, tokens=(7,), output_index=1, limit=limit)


def apply_all(table: RowTable, *operations: RowOperation) -> None:
    for operation in operations:
        table.apply(operation)
