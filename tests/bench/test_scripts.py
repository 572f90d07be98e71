"""The scripts beside the package, as far as they can run without a GPU."""

import runpy
from pathlib import Path

import pytest

from bench.http_load import quantile

BENCH = Path(__file__).parent.parent.parent / "bench"


def test_a_quantile_of_what_was_counted_between_two_looks():
    """90 looks below 10 ms, 10 between 10 and 20: the 95th of 100 is 15 ms, the 45th 5."""
    before = {0.01: 5.0, 0.02: 5.0, float("inf"): 5.0}
    after = {0.01: 95.0, 0.02: 105.0, float("inf"): 105.0}

    assert quantile(0.95, before, after) == pytest.approx(0.015)
    assert quantile(0.45, before, after) == pytest.approx(0.005)
    assert quantile(0.99, before, {0.01: 95.0, 0.02: 105.0, float("inf"): 205.0}) == 0.02


def test_the_picture_of_the_anchor_rows(tmp_path, monkeypatch):
    file = tmp_path / "rows.png"
    monkeypatch.setattr("sys.argv", ["plot.py", "--out", str(file)])
    monkeypatch.syspath_prepend(str(BENCH))

    runpy.run_path(str(BENCH / "plot.py"), run_name="__main__")

    assert file.read_bytes().startswith(b"\x89PNG")
