"""How long the scheduler's core takes for a plan, and whether that grows with the queue.

Nothing but the core runs: no socket, no model. Two workers answer at once; on one of them
rows decode, each of which brings a token in every turn, and whoever ends is followed by the
next prompt, of one of several tenants and with a beginning that is often cached. Fleets that
differ only in how many requests wait go through the same turns side by side, so that a noisy
machine disturbs all of them alike: the ratio is the median of the ratios of the same turn.
Times are those of this thread's CPU.

    python benchmarks/planner.py            # about a minute
    python benchmarks/planner.py --help
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from random import Random
from statistics import fmean, median, quantiles

import msgspec

from tidegate.ipc.protocol import (
    Chunk,
    ChunkDone,
    EndReason,
    Fetch,
    FetchResult,
    Grow,
    Incarnation,
    PlanSeq,
    PoolHandle,
    PoolId,
    RequestId,
    Role,
    Row,
    RowEnd,
    Stop,
    Trim,
    Trimmed,
    WorkerId,
    pack_ids,
    unpack_ids,
)
from tidegate.kvcache.demand import Lengths
from tidegate.kvcache.layout import (
    All,
    Group,
    Layout,
    Pages,
    TensorSpec,
    Tokens,
    Window,
    token_capacity,
)
from tidegate.scheduler.commands import Command, SendPlan, StartRow
from tidegate.scheduler.core import Core
from tidegate.scheduler.events import ClientId, Reported, Submitted, WorkerJoined
from tidegate.scheduler.settings import CoreSettings

PAGE_TOKENS = Tokens(16)
WINDOW_TOKENS = Tokens(512)
PROMPT_TOKENS = (64, 512)  # Shortest and longest.
OUTPUT_TOKENS = (200, 800)
CHUNK_TOKENS = Tokens(2048)
UNIT_TOKENS = 16  # Of a prefix cache: the page of both groups.
STEM_COUNT = 50  # So many beginnings the prompts have, each of so many units.
STEM_UNITS = 8
CLIENT_COUNT = 32
TENANT_COUNT = 4
CONTEXT_TOKENS = 8192
TURN_US = 20_000
PREFILL_ROW_COUNT = 32
SPARE_ROW_COUNT = 4  # More than are to decode, as rows that change hands are empty for a while.
WARM_UP_TURN_COUNT = 120
RATIO_MAX = 1.2


class Turn(msgspec.Struct, frozen=True):
    """Microseconds that one turn took. `decoding_count` rows brought a token each."""

    apply_us: float
    plan_us: float
    decoding_count: int


class DecodingRow:
    """How far a row is, may go, and how far its pages reach in each group."""

    def __init__(self, start: StartRow) -> None:
        self.position = start.position
        self.limit = start.limit
        self.reaches = [run.first_position + tokens_of(run.ids) for run in start.pages]

    @property
    def is_ready(self) -> bool:
        return self.position < min(self.reaches)


class InstantWorker:
    """A worker that has carried out every plan when the next turn comes."""

    def __init__(
        self, name: str, role: Role, index: int, row_count: int, page_share: float
    ) -> None:
        tensor = TensorSpec("k", 0, (1, 256), "bfloat16")
        groups = (
            Group("full", All(), PAGE_TOKENS, (tensor,)),
            Group("window", Window(WINDOW_TOKENS), PAGE_TOKENS, (tensor,)),
        )
        longest = Lengths(Tokens(PROMPT_TOKENS[1]), Tokens(OUTPUT_TOKENS[1]))
        counts = tuple(
            Pages(math.ceil(page_share * row_count * group.pages(longest.end)))
            for group in groups
        )
        pool = PoolId(name)
        self.name = WorkerId(name)
        self.joined = WorkerJoined(
            self.name,
            role,
            pool,
            Incarnation(index),
            Layout(groups, True),
            CONTEXT_TOKENS,
            PoolHandle("memory", name, 0, counts),
            row_count,
        )
        self.decoding: dict[Row, DecodingRow] = {}
        self._seq = PlanSeq(0)
        self._report_count = 0

    def answer(self, plan: SendPlan | None) -> Reported | None:
        """What the launch under this plan brings; None if there is nothing to say."""
        chunks: list[Chunk] = []
        fetched: list[FetchResult] = []
        trimmed: list[Trimmed] = []
        for operation in () if plan is None else plan.operations:
            match operation:
                case StartRow() if self.joined.role is Role.DECODE:
                    self.decoding[operation.row] = DecodingRow(operation)
                case Grow() if operation.row in self.decoding:
                    reaches = self.decoding[operation.row].reaches
                    reaches[operation.group] += tokens_of(operation.ids)
                case Trim() if operation.row in self.decoding:
                    trimmed.append(self._trim(operation))
                case Chunk():
                    chunks.append(operation)
                case Stop():
                    self.decoding.pop(operation.row, None)
                case Fetch():
                    fetched.append(FetchResult(operation.ticket, "", 1, 1))
                case _:
                    pass
        sampled = [chunk.row for chunk in chunks if chunk.sample]
        ended = [RowEnd(row, EndReason.LENGTH) for row in sampled]
        for row, state in tuple(self.decoding.items()):
            if state.is_ready:
                sampled.append(row)
                state.position += 1
            if state.position == state.limit:
                del self.decoding[row]
                ended.append(RowEnd(row, EndReason.LENGTH))
        if plan is not None:
            self._seq = plan.seq
        if plan is None and not sampled:
            return None
        self._report_count += 1
        return Reported(
            self.name,
            self._report_count,
            self._seq,
            self._seq,
            rows=pack_ids(sampled),
            counts=pack_ids([1] * len(sampled)),
            ended=tuple(ended),
            chunks=tuple(ChunkDone(chunk.row, chunk.until) for chunk in chunks),
            fetched=tuple(fetched),
            trimmed=tuple(trimmed),
        )

    def _trim(self, trim: Trim) -> Trimmed:
        """Give up the pages of a row that hold nothing below `until` nor what it feeds next."""
        state = self.decoding[trim.row]
        keep = Tokens(max(trim.until, state.position + 1))
        counts: list[int] = []
        for index, group in enumerate(self.joined.layout.groups):
            kept = group.pages(keep)
            counts.append(max(0, group.pages(Tokens(state.reaches[index])) - kept))
            if counts[-1]:
                state.reaches[index] = token_capacity(kept, group.page_tokens)
        return Trimmed(trim.row, tuple(counts))


def tenant_name(tenant: int) -> str:
    return f"tenant-{tenant}"


def unit_hashes(number: int, prompt_tokens: int) -> tuple[bytes, ...]:
    """Of a prompt that begins as some others do, and then as no other."""
    count = prompt_tokens // UNIT_TOKENS
    shared = [(number % STEM_COUNT, unit) for unit in range(min(count, STEM_UNITS))]
    own = [(STEM_COUNT + number, unit) for unit in range(STEM_UNITS, count)]
    return tuple(
        author.to_bytes(8, "little") + unit.to_bytes(8, "little")
        for author, unit in (*shared, *own)
    )


def tokens_of(page_ids: bytes) -> int:
    """How many positions these pages hold."""
    return token_capacity(Pages(len(unpack_ids(page_ids))), PAGE_TOKENS)


class Fleet:
    """A core with `running` rows that decode and `waiting` requests in the queue."""

    def __init__(self, running: int, waiting: int, page_share: float = 1.0) -> None:
        self.waiting = waiting
        waiting_count_max = waiting + 2 * running
        self.core = Core(
            CoreSettings(
                chunk_tokens=CHUNK_TOKENS,
                waiting_count_max=waiting_count_max,
                waiting_tokens_max=waiting_count_max * PROMPT_TOKENS[1],
                # None is a simple fraction of another: it is never a draw between tenants.
                tenant_weights={tenant_name(n): 1 + n * 0.0137 for n in range(TENANT_COUNT)},
            )
        )
        self.plans: dict[WorkerId, SendPlan] = {}
        self._randoms = [Random(tenant) for tenant in range(TENANT_COUNT)]
        self._submitted_counts = [0] * TENANT_COUNT
        self._now_us = 0
        rows = running + SPARE_ROW_COUNT
        self._workers = [
            InstantWorker("prefill", Role.PREFILL, 0, PREFILL_ROW_COUNT, 1.0),
            InstantWorker("decode", Role.DECODE, 1, rows, page_share),
        ]
        for worker in self._workers:
            self.core.apply(worker.joined, 0)
        begin = time.thread_time_ns()
        for number in range(rows):
            # The first ones are found anywhere between their first token and their last.
            self._submit(number % TENANT_COUNT, 2)
        self._fill_queue()
        self.submit_us = (time.thread_time_ns() - begin) / 1e3 / sum(self._submitted_counts)
        for _ in range(WARM_UP_TURN_COUNT):
            self.turn()

    def turn(self) -> Turn:
        """Both workers' answers, then a plan; then the queue is as long again as it was."""
        self._now_us += TURN_US
        answers = [worker.answer(self.plans.get(worker.name)) for worker in self._workers]
        reports = [report for report in answers if report is not None]
        decoding_count = sum(
            len(report.rows) // 4
            for report in reports
            if report.worker == self._workers[1].name
        )
        core, now_us = self.core, self._now_us
        begin = time.thread_time_ns()
        for report in reports:
            core.apply(report, now_us)
        applied = time.thread_time_ns()
        commands = core.plan(now_us)
        planned = time.thread_time_ns()
        self._take(commands)
        self._fill_queue()
        return Turn((applied - begin) / 1e3, (planned - applied) / 1e3, decoding_count)

    def _take(self, commands: Sequence[Command]) -> None:
        self.plans = {plan.worker: plan for plan in commands if isinstance(plan, SendPlan)}

    def _fill_queue(self) -> None:
        """Each tenant has as many requests again as before, so that all fleets go on alike."""
        for tenant in range(TENANT_COUNT):
            load = self.core.fleet.waiting.loads.get(tenant_name(tenant))
            for _ in range(self.waiting // TENANT_COUNT - (0 if load is None else load.count)):
                self._submit(tenant, OUTPUT_TOKENS[0])
        count = len(self.core.fleet.waiting)
        assert count >= self.waiting // TENANT_COUNT * TENANT_COUNT, "requests were refused"

    def _submit(self, tenant: int, output_tokens_min: int) -> None:
        number = self._submitted_counts[tenant]
        self._submitted_counts[tenant] += 1
        random = self._randoms[tenant]
        prompt_tokens = random.randint(*PROMPT_TOKENS)
        submitted = Submitted(
            RequestId(f"{tenant_name(tenant)}-{number}"),
            ClientId(f"client-{number % CLIENT_COUNT}"),
            prompt_tokens,
            random.randint(output_tokens_min, OUTPUT_TOKENS[1]),
            unit_hashes=unit_hashes(TENANT_COUNT * number + tenant, prompt_tokens),
            tenant=tenant_name(tenant),
        )
        self.core.apply(submitted, self._now_us)


def measure(fleets: Sequence[Fleet], turn_count: int) -> list[list[Turn]]:
    """The turns of each fleet, one of each in turn; each time another one goes first."""
    turns: list[list[Turn]] = [[] for _ in fleets]
    order = list(range(len(fleets)))
    for _ in range(turn_count):
        for index in order:
            turns[index].append(fleets[index].turn())
        order = [*order[1:], order[0]]
        assert all(fleet.plans == fleets[0].plans for fleet in fleets), "the work differs"
    return turns


def figures_of(fleets: Sequence[Fleet], turns: Sequence[Sequence[Turn]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for fleet, measured in zip(fleets, turns, strict=True):
        plans = [turn.plan_us for turn in measured]
        count = fleet.waiting
        figures[f"plan_us_{count}"] = median(plans)
        figures[f"plan_us_p99_{count}"] = quantiles(plans, n=100)[-1]
        figures[f"plan_us_max_{count}"] = max(plans)
        figures[f"apply_us_{count}"] = median(turn.apply_us for turn in measured)
        figures[f"submit_us_{count}"] = fleet.submit_us
        figures[f"decoding_mean_{count}"] = fmean(turn.decoding_count for turn in measured)
    name = f"{fleets[-1].waiting}_over_{fleets[0].waiting}"
    pairs = list(zip(turns[0], turns[-1], strict=True))
    figures[f"ratio_{name}"] = median(more.plan_us / few.plan_us for few, more in pairs)
    figures[f"apply_ratio_{name}"] = median(more.apply_us / few.apply_us for few, more in pairs)
    return figures


def print_table(figures: dict[str, float], waiting: Sequence[int]) -> None:
    columns = {
        "plan us": "plan_us",
        "p99": "plan_us_p99",
        "max": "plan_us_max",
        "apply us": "apply_us",
        "submit us": "submit_us",
        "decoding": "decoding_mean",
    }
    print(f"{'waiting':>10}" + "".join(f"{head:>11}" for head in columns))
    for count in waiting:
        row = "".join(f"{figures[f'{name}_{count}']:11.1f}" for name in columns.values())
        print(f"{count:10d}{row}")
    name = f"{waiting[-1]}_over_{waiting[0]}"
    print(f"a plan at {waiting[-1]} waiting over one at {waiting[0]}: ", end="")
    print(f"{figures[f'ratio_{name}']:.3f} (to be at most {RATIO_MAX})")
    print(f"the reports before it: {figures[f'apply_ratio_{name}']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--running", type=int, default=256, help="rows that decode")
    parser.add_argument(
        "--waiting",
        type=int,
        nargs="+",
        default=[100, 10_000, 100_000],
        help="requests in the queue: one fleet for each number",
    )
    parser.add_argument("--turns", type=int, default=600, help="turns of each fleet")
    parser.add_argument(
        "--page-share",
        type=float,
        default=1.0,
        help="pages for decoding, as a share of what the longest requests would need;"
        " below about 0.45 rows have to give way",
    )
    options = parser.parse_args()
    waiting = sorted(options.waiting)
    fleets: list[Fleet] = []
    for count in waiting:
        print(f"a fleet with {count} waiting requests", file=sys.stderr)
        fleets.append(Fleet(options.running, count, options.page_share))
    figures = figures_of(fleets, measure(fleets, options.turns))
    print_table(figures, waiting)
    rounded = {name: round(value, 3) for name, value in figures.items()}
    print(json.dumps({"benchmark": "planner", "figures": rounded}))


if __name__ == "__main__":
    main()
