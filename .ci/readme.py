"""Write README.md from `nbs/index.ipynb`, outputs included, nothing executed."""

from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import TagRemovePreprocessor
from traitlets.config import Config

root = Path(__file__).resolve().parent.parent
notebook = nbformat.read(root / "nbs" / "index.ipynb", as_version=4)
for cell in notebook.cells:
    if cell.cell_type == "code":
        lines = cell.source.splitlines()
        directives = [line for line in lines if line.startswith("#|")]
        cell.source = "\n".join(line for line in lines if not line.startswith("#|"))
        cell.metadata["tags"] = ["hide"] if any("hide" in line for line in directives) else []

config = Config()
config.TagRemovePreprocessor.remove_cell_tags = ("hide",)
notebook.metadata["language_info"] = {"name": "python"}
exporter = MarkdownExporter(config=config)
exporter.register_preprocessor(TagRemovePreprocessor(config=config), enabled=True)
body, _ = exporter.from_notebook_node(notebook)
note = "<!-- Written from nbs/index.ipynb by .ci/readme.py; edit the notebook. -->\n"
body = body.replace("```bash\n%%bash\n", "```bash\n")
(root / "README.md").write_text(note + body.strip() + "\n", encoding="utf-8")
