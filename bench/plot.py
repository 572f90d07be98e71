"""The anchor rows as a picture: how fast each one is beside the peer, the goal and what the memory allows.

    python bench/plot.py                      bench/results/anchors-h200.json -> bench/results/anchors-h200.png

Needs matplotlib (`pip install tinyserve[notebook]`). A bar's length is the speed as a multiple of the peer's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from anchors import ROWS  # beside this file

RESULTS = Path(__file__).parent / "results" / "anchors-h200.json"
COLOURS = {"met": "#2a7f62", "missed": "#c7642c"}


def speed(row, value: float) -> float:
    """A value of the row's unit as a multiple of the peer's speed."""
    return row.peer / value if row.unit == "ms/token" else value / row.peer


def size(wanted: int | tuple[int, int]) -> str:
    return f"{wanted[0]}-{wanted[1]}" if isinstance(wanted, tuple) else str(wanted)


def label(name: str) -> str:
    """What the row's work is, in two lines."""
    row = ROWS[name]
    return f"{name}  {row.model}\nbatch {row.batch}, {size(row.prompt)} in, {size(row.out)} out"


def draw(found: dict, file: Path) -> None:
    """Write the picture of the rows that were measured."""
    from matplotlib.figure import Figure

    names = [name for name in ROWS if name in found and ROWS[name].peer]
    figure = Figure(figsize=(9, 1.2 + 0.62 * len(names)), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(reversed(names)):
        row, value = ROWS[name], found[name]["value"]
        ours, floor = speed(row, value), speed(row, row.floor)
        state = "met" if ours >= speed(row, row.must) else "missed"
        axes.barh(place, floor, height=0.72, color="#e8e8e8")
        axes.barh(place, ours, height=0.5, color=COLOURS[state])
        axes.plot([speed(row, row.must)] * 2, [place - 0.36, place + 0.36], color="black", linewidth=1.6)
        shown = f"{value:g} {row.unit}" if row.unit == "ms/token" else f"{value:,.0f} {row.unit}"
        axes.text(max(floor, ours) + 0.03, place, f"{shown}, {ours:.2f}x", va="center", fontsize=8)
    axes.axvline(1, color="#444444", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(names)), [label(name) for name in reversed(names)], fontsize=8)
    axes.set_xlim(0, max(speed(ROWS[name], ROWS[name].floor) for name in names) + 2)
    axes.set_xlabel("speed, multiples of vLLM 0.25.1 (dotted); grey: the floor of the hardware; black: the goal")
    axes.set_title("One H200: tinyserve, goal met (green) or missed (orange)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--out", type=Path, help="[the same name with .png]")
    options = parser.parse_args()
    file = options.out or options.results.with_suffix(".png")
    draw(json.loads(options.results.read_text())["rows"], file)
    print(file)


if __name__ == "__main__":
    main()
