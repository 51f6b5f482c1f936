"""The scheduler's benchmark: a small run of the program itself."""

import subprocess
import sys
from pathlib import Path

import msgspec

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "scheduler_overhead.py"


class LastLine(msgspec.Struct):
    benchmark: str
    figures: dict[str, float | None]


def test_its_last_line_tells_what_a_token_costs_and_how_many_pass_in_a_second() -> None:
    command = [
        sys.executable,
        str(PROGRAM),
        "--quick",
        "--turns",
        "600",
        "--mock-tokens",
        "9000",
    ]
    sizes = ["--rows", "3", "--workers", "2", "--clients", "5"]
    run = subprocess.run([*command, *sizes], capture_output=True, text=True, check=True)
    last = msgspec.json.decode(run.stdout.splitlines()[-1], type=LastLine)
    assert last.benchmark == "scheduler_overhead"
    is_told = dict.fromkeys(last.figures, True)
    assert is_told == {
        "core_us_per_token_3": True,
        "shell_us_per_token_3": True,
        "vllm_us_per_token_3": True,
        "mock_tokens_per_s": True,
        "mock_tokens_per_cpu_s": True,
        "mock_tokens_per_s_2x3": True,
        "mock_tokens_per_cpu_s_2x3": True,
        "fan_out_tokens_per_s_5": True,
        "fan_out_tokens_per_cpu_s_5": True,
    }
    found = [value for name, value in last.figures.items() if not name.startswith("vllm")]
    assert all(value is not None and value > 0 for value in found)
