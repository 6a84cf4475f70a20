"""Every notebook from top to bottom in a kernel of its own, as JupyterLab runs it, slow cells included."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "nbs").glob("*.ipynb"))


def executed(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    "The notebook after a kernel has run all of it, except for what says of itself that it is never run."
    for cell in notebook.cells:
        if cell.cell_type == "code" and re.search(r"^#\|\s*eval:\s*false", cell.source, re.M):
            cell.source = ""
    there = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=there).execute()
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs_in_a_real_kernel(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in executed(notebook, path.parent).cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    # A widget would be a blank in the notebook as it is committed, and on the web.
    assert not [kind for output in outputs for kind in output.get("data", {}) if "widget" in kind]


BAR = """
from fault_tolerant_transformer_lab.equivalence import example_run, prove_restart
proof = prove_restart(example_run, steps=4, how="clean", in_process=True, progress_bar=True)
print(proof.table())
"""


def test_a_progress_bar_stays_on_one_line_and_a_table_keeps_its_columns_in_a_kernel(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(BAR)])
    outputs = executed(notebook, tmp_path).cells[0].outputs
    told = {name: "".join(output.text for output in outputs if output.get("name") == name)
            for name in ("stdout", "stderr")}
    assert {output.output_type for output in outputs} == {"stream"}
    bar, *rest = [line for line in told["stderr"].split("\n") if line.strip()]
    assert rest == [] and "\r" in bar and "100%" in bar.rsplit("\r", 1)[-1]
    table = told["stdout"].splitlines()
    assert len({line.index(word) for line, word in zip(table[:3], ("result", "equal", "equal"), strict=True)}) == 1
