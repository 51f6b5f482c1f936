"""What the scheduler costs: beside a bare loop, with engines that cost nothing, and a token.

    python benchmarks/scheduler_overhead.py             # some minutes, with the real model
    python benchmarks/scheduler_overhead.py --quick     # about half a minute, without it

1. Decode speed of a server over that of a bare loop over the same model at the same batch.
   The two take turns on the same machine, and the figure is the median of the turns' ratios.
2. Tokens a second through one scheduler process and real sockets, with mock engines; then with
   their rows spread over many client connections. The limit is the largest of the table.
3. Microseconds of CPU a token in the scheduler's core and shell; beside it, where vLLM is
   installed, those of its scheduler on batches of the same size, without a model.

The last line is JSON. A machine with neighbours gives smaller speeds, and the same CPU a token.
"""

import argparse
import json
import os
import random

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # For torch, if it is loaded.

from mock_fleet import MockSize, MockSpeed, measure_mock
from model_options import add_model_options
from scheduler_cost import SLICE_TURN_COUNT, Cost, measure_cost
from vllm_scheduler import vllm_us_per_token

STREAM_COUNTS = (1, 8, 32)
WORKER_COUNTS = (1, 8, 64)
ROW_COUNTS = (1, 16, 256)
CLIENT_COUNTS = (16, 256)
CLIENTS_SIZE = (1, 256)  # Workers, and rows on each, whose streams go to many connections.
CONTEXT_TOKENS_VLLM = 128
TURN_COUNT = 1000
MOCK_TOKENS = 200_000

Figures = dict[str, float | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller, and without a model")
    add_model_options(parser)
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAM_COUNTS))
    parser.add_argument("--rounds", type=int, default=5, help="turns of server and bare loop")
    parser.add_argument("--step-count", type=int, default=48, help="decode steps of a turn")
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKER_COUNTS))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROW_COUNTS))
    parser.add_argument("--clients", type=int, nargs="*", default=list(CLIENT_COUNTS))
    parser.add_argument("--mock-tokens", type=int, default=MOCK_TOKENS, help="of each mock run")
    parser.add_argument("--turns", type=int, default=TURN_COUNT, help="of each cost")
    arguments = parser.parse_args()

    scale = 10 if arguments.quick else 1
    if (turns_min := SLICE_TURN_COUNT * scale) > arguments.turns:
        parser.error(f"argument --turns: must be at least {turns_min}, got {arguments.turns}")
    figures: Figures = {}
    measure_costs(arguments.rows, arguments.turns // scale, figures)
    sizes = [
        MockSize(workers, rows) for workers in arguments.workers for rows in arguments.rows
    ]
    measure_mocks(sizes, arguments.mock_tokens // scale, figures)
    sizes = [MockSize(*CLIENTS_SIZE, client_count=count) for count in arguments.clients]
    measure_fan_out(sizes, arguments.mock_tokens // scale, figures)
    if not arguments.quick:
        # Only here, as it loads torch.
        from served_over_bare import measure_served

        measure_served(arguments, random.Random(0), figures)
    rounded = {
        name: None if value is None else round(value, 3) for name, value in figures.items()
    }
    print(json.dumps({"benchmark": "scheduler_overhead", "figures": rounded}))


def measure_costs(row_counts: list[int], turn_count: int, figures: Figures) -> None:
    print(f"\n{'CPU a token':>24}{'core us':>10}{'shell us':>10}")
    for count in row_counts:
        cost: Cost = measure_cost(count, turn_count)
        figures[f"core_us_per_token_{count}"] = cost.core_us
        figures[f"shell_us_per_token_{count}"] = cost.shell_us
        print(f"{count:19d} rows{cost.core_us:10.3f}{cost.shell_us:10.3f}", flush=True)
    for count in row_counts:
        found = vllm_us_per_token(count, CONTEXT_TOKENS_VLLM, turn_count)
        figures[f"vllm_us_per_token_{count}"] = found
        if found is not None:
            ours = figures[f"core_us_per_token_{count}"]
            assert ours is not None
            print(f"{count:19d} rows{found:10.1f} (vLLM's scheduler, {found / ours:.0f} times)")


def measure_mocks(sizes: list[MockSize], tokens: int, figures: Figures) -> None:
    print(f"\n{'workers x rows':>24}{'tokens/s':>12}  (1: the share of a core that was used)")
    speeds: list[MockSpeed] = []
    for size in sizes:
        speed = measure_mock(size, tokens)
        speeds.append(speed)
        name = f"{size.worker_count}x{size.row_count}"
        figures[f"mock_tokens_per_s_{name}"] = speed.tokens_per_s
        figures[f"mock_tokens_per_cpu_s_{name}"] = speed.tokens_per_cpu_s
        print_speed(name, speed)
    if speeds:
        best = max(speeds, key=lambda speed: speed.tokens_per_s)
        figures["mock_tokens_per_s"] = best.tokens_per_s
        figures["mock_tokens_per_cpu_s"] = max(speed.tokens_per_cpu_s for speed in speeds)
        print(f"the limit is {best.tokens_per_s:,.0f} tokens/s, set by the {best.limit}")


def measure_fan_out(sizes: list[MockSize], tokens: int, figures: Figures) -> None:
    print(f"\n{'client connections':>24}{'tokens/s':>12}")
    for size in sizes:
        speed = measure_mock(size, tokens)
        figures[f"fan_out_tokens_per_s_{size.client_count}"] = speed.tokens_per_s
        figures[f"fan_out_tokens_per_cpu_s_{size.client_count}"] = speed.tokens_per_cpu_s
        print_speed(str(size.client_count), speed)


def print_speed(name: str, speed: MockSpeed) -> None:
    print(
        f"{name:>24}{speed.tokens_per_s:12,.0f}  scheduler {speed.scheduler_share:.2f}, "
        f"mock engines {speed.bench_share:.2f}; "
        f"{1e6 / speed.tokens_per_cpu_s:.2f} us of the scheduler's process a token",
        flush=True,
    )


if __name__ == "__main__":
    main()
