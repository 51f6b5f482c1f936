"""The planner's benchmark: a small run of the program itself."""

import subprocess
import sys
from pathlib import Path

import msgspec

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "planner.py"


class LastLine(msgspec.Struct):
    benchmark: str
    figures: dict[str, float]


def test_its_last_line_tells_the_figures_of_each_queue_and_their_ratio() -> None:
    command = [sys.executable, str(PROGRAM), "--running", "8", "--waiting", "300", "60"]
    run = subprocess.run(
        [*command, "--turns", "20"], capture_output=True, text=True, check=True
    )
    last = msgspec.json.decode(run.stdout.splitlines()[-1], type=LastLine)
    assert last.benchmark == "planner"
    for count in (60, 300):
        assert last.figures[f"plan_us_{count}"] > 0 and last.figures[f"apply_us_{count}"] > 0
        assert last.figures[f"decoding_mean_{count}"] >= 8
    assert last.figures["ratio_300_over_60"] > 0
