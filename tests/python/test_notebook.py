"""The notebook of the docs: a kernel runs its cells, which print what the page shows."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

PAGE = Path(__file__).resolve().parents[2] / "docs" / "notebook.ipynb"


def printed(cell):
    """The text that a cell has printed, with its value; what goes to standard error is left out."""
    texts = [
        output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]
        for output in cell.outputs
        if output.get("name") != "stderr"
    ]
    return "".join(texts).strip()


def test_the_cells_of_the_notebook_print_what_it_shows():
    notebook = nbformat.read(PAGE, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [printed(cell) for cell in cells]
    NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    assert [printed(cell) for cell in cells] == shown
    assert any("WorkerLostError" in text for text in shown)
    assert not [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
