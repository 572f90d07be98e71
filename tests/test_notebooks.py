"""The lessons run from top to bottom, in an empty folder, and are stored without outputs."""

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 120  # none takes more than ten on one free core; CI's cores are shared
MODEL = {"01_request_life"}  # these load the default model
CASES = [pytest.param(path, id=path.stem, marks=[pytest.mark.model] * (path.stem in MODEL)) for path in NOTEBOOKS]


@pytest.mark.parametrize("path", CASES)
def test_notebook_runs(path, tmp_path):
    """Cells that raise: 0. The kernel imports the package of this checkout, whatever is installed."""
    notebook = nbformat.read(path, as_version=4)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    client = nbclient.NotebookClient(
        notebook, timeout=CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=environment)

    drawn = [out for cell in notebook.cells for out in cell.get("outputs", ()) if "image/png" in out.get("data", {})]
    assert len(drawn) >= 3, "a lesson draws what it explains"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path):
    """Outputs in the file: 0. They would make every change of a lesson unreadable as a diff."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]

    assert [cell.id for cell in code if cell.outputs or cell.execution_count is not None] == []
    assert "## Exercises" in notebook.cells[-1].source
