"""The notebooks of examples/notebooks run from the first cell to the last."""
import pathlib

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat, nbclient and ipykernel are not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel are not installed")
NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.get("execution_count") for cell in notebook.cells if cell.cell_type == "code")


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 2
