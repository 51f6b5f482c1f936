"""Draws the curves of the goodput benchmark into one SVG file.

It takes files of results, and the file to draw: goodput_plot.py RESULTS.json [...] OUT.svg
"""

# matplotlib's own types leave the keyword arguments of its methods open.
# pyright: reportUnknownMemberType=false

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from goodput_results import KEPT_SHARE, Curve, Results
from trace_fleets import CACHED, CAPPED, DEADLINES, FLEETS, LAWLESS, OURS

# Colours that people with any colour vision tell apart, on the white that is drawn behind.
COLOURS = {
    CAPPED: "#d55e00",
    LAWLESS: "#cc79a7",
    OURS: "#0072b2",
    DEADLINES: "#009e73",
    CACHED: "#000000",
    "4 both": "#0072b2",
    "3 P + 1 D": "#009e73",
    "2 P + 2 D": "#e69f00",
    "1 P + 3 D": "#d55e00",
}
MARKERS = "osD^v"
PANELS = ("4 both", "3 P + 1 D")  # Fleets whose doors are compared.


def draw(results: Results, path: Path) -> None:
    """One row of panels for each trace: doors on two fleets, and fleets behind our door."""
    mpl.rcParams.update(
        {"svg.hashsalt": "goodput", "svg.fonttype": "none", "font.family": "sans-serif"}
    )
    figure = Figure(figsize=(13, 4.2 * len(results.traces)), facecolor="white")
    figure.set_layout_engine("constrained")
    panels = figure.subplots(len(results.traces), len(PANELS) + 1, squeeze=False)
    for row, result in zip(panels, results.traces, strict=True):
        label = (
            f"goodput (% of requests)\nTTFT up to {result.ttft_ms / 1e3:g} s, "
            f"TPOT up to {results.tpot_ms:g} ms"
        )
        row[0].set_ylabel(label)
        for axes, fleet in zip(row, PANELS, strict=False):
            curves = [curve for curve in result.curves if curve.fleet == fleet]
            title = f"{result.trace}: doors, {fleet}"
            draw_panel(axes, title, curves, lambda curve: curve.door)
        ours = [curve for fleet in FLEETS for curve in result.curves if is_ours(curve, fleet)]
        title = f"{result.trace}: fleets, our door"
        draw_panel(row[-1], title, ours, lambda curve: curve.fleet)
    figure.savefig(path, format="svg", metadata={"Date": None})


def is_ours(curve: Curve, fleet: str) -> bool:
    return curve.fleet == fleet and curve.door == OURS


def draw_panel(
    axes: Axes,
    title: str,
    curves: Sequence[Curve],
    label_of: Callable[[Curve], str],
) -> None:
    for number, curve in enumerate(curves):
        label = label_of(curve)
        axes.plot(
            [point.speed for point in curve.points],
            [100 * point.score.goodput for point in curve.points],
            label=label,
            color=COLOURS[label],
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
        )
    axes.axhline(100 * KEPT_SHARE, color="#888888", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(speed_text))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 103)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("speed of the trace, times that of the recording")
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.legend(loc="lower left", fontsize=8)


def speed_text(speed: float, _: int | None = None) -> str:
    """How a tick of the speed is labelled."""
    return f"{speed:g}x"


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit((__doc__ or "").strip())
    *sources, target = map(Path, sys.argv[1:])
    found = [msgspec.json.decode(path.read_bytes(), type=Results) for path in sources]
    for other in found[1:]:
        found[0].traces += other.traces
    draw(found[0], target)


if __name__ == "__main__":
    main()
