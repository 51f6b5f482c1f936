"""The goodput benchmark: a slice of the whole program on a trace made here, and its plot."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from goodput import Score
from goodput_plot import draw
from goodput_results import Curve, Point, Results, TraceResult, figures_of

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "trace_goodput.py"


class LastLine(msgspec.Struct):
    benchmark: str
    figures: dict[str, float | None]


def azure_trace(folder: Path) -> Path:
    """Two requests a second; every fourth prompt is longer than the window pool."""
    path = folder / "made_up.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for number in range(24):
        prompt = 4000 if number % 4 == 3 else 300 + 10 * number
        lines.append(
            f"2023-11-16 18:00:{number // 2:02}.{number % 2 * 5},{prompt},{5 + number}"
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_score(goodput: float) -> Score:
    return Score(goodput, 100, 0, 0, 0, 0, 0, 0, 0, 0, 1.0, 2.0, 0.5, 0.75)


def make_results() -> Results:
    points = [Point(speed, make_score(1 / speed), 0.5) for speed in (1.0, 2.0, 4.0)]
    curves = [
        Curve(fleet, door, points)
        for fleet in ("4 both", "3 P + 1 D")
        for door in ("ours", "window-capped")
    ]
    trace = TraceResult("made_up", 100, 60.0, 64, 1000.0, {"full": 64}, curves)
    return Results(0.01, 7.0, 60_000.0, [trace])


def test_its_last_line_tells_the_goodput_of_each_curve(tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    command = [sys.executable, str(PROGRAM), str(azure_trace(tmp_path)), "--requests", "20"]
    command += ["--speeds", "1", "4", "--results", str(written)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    last = msgspec.json.decode(run.stdout.splitlines()[-1], type=LastLine)
    assert last.benchmark == "trace_goodput"
    figures = last.figures
    for fleet in ("4_both", "3_p_1_d"):
        assert figures[f"made_up_{fleet}_ours_1x"] == 1.0
        assert figures[f"made_up_{fleet}_ours_speed_90"] == 4.0
        assert figures[f"made_up_{fleet}_full_pool_no_law_1x"] == 1.0
        assert figures[f"made_up_{fleet}_window_capped_4x"] == 0.75
        assert figures[f"made_up_{fleet}_window_capped_speed_90"] is None
    results = msgspec.json.decode(written.read_bytes(), type=Results)
    assert figures_of(results) == figures


def test_what_is_no_trace_is_told_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.touch()
    command = [sys.executable, str(PROGRAM), str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "trace.txt: a trace ends with .csv or .jsonl" in run.stderr


def test_figures_have_the_headline_speed_and_each_goodput() -> None:
    figures = figures_of(make_results())
    assert figures["made_up_4_both_ours_2x"] == 0.5
    kept = figures["made_up_3_p_1_d_ours_speed_90"]
    assert kept == pytest.approx(2**0.2, abs=0.01)


def test_the_plot_is_small_and_names_its_curves_and_units(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    draw(make_results(), path)
    text = path.read_text(encoding="utf-8")
    assert len(text) < 150_000
    for part in ("window-capped", "3 P + 1 D", "goodput (%", "speed of the trace"):
        assert part in text
    before = text
    draw(make_results(), path)
    assert path.read_text(encoding="utf-8") == before, "the same results give the same file"
