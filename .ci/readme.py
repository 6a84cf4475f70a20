"""Write README.md and its picture from `nbs/index.ipynb`, outputs included, nothing executed."""

import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import TagRemovePreprocessor
from traitlets.config import Config

PICTURES = {  # names for the notebook's figures, in their order, and what they show
    "same_loss.png": "The printed losses of two runs are equal in every digit, and their weights are not"}
LONG = 30  # lines of output that a reader has to open

root = Path(__file__).resolve().parent.parent
notebook = nbformat.read(root / "nbs" / "index.ipynb", as_version=4)
for cell in notebook.cells:
    if cell.cell_type == "code":
        lines = cell.source.splitlines()
        directives = [line for line in lines if line.startswith("#|")]
        cell.source = "\n".join(line for line in lines if not line.startswith("#|"))
        cell.metadata["tags"] = [tag for tag, text in (("hide", "hide"), ("output-only", "echo: false"))
                                 if any(text in line for line in directives)]

config = Config()
config.TagRemovePreprocessor.remove_cell_tags = ("hide",)
config.TagRemovePreprocessor.remove_input_tags = ("output-only",)
notebook.metadata["language_info"] = {"name": "python"}
exporter = MarkdownExporter(config=config)
exporter.register_preprocessor(TagRemovePreprocessor(config=config), enabled=True)
body, resources = exporter.from_notebook_node(notebook)

pictures = {key: data for key, data in resources.get("outputs", {}).items() if key.endswith(".png")}
if len(pictures) != len(PICTURES):
    raise SystemExit(f"nbs/index.ipynb: expected {len(PICTURES)} figures, found {len(pictures)}; name them in PICTURES")
(root / "nbs" / "images").mkdir(exist_ok=True)
for (name, shown), (key, data) in zip(PICTURES.items(), sorted(pictures.items()), strict=True):
    target = root / "nbs" / "images" / name
    if not target.exists() or target.read_bytes() != data:
        target.write_bytes(data)
    body = body.replace(f"![png]({key})", f"![{shown}](nbs/images/{name})")


def folded(match: re.Match[str]) -> str:
    "A long output behind its last line, an indented block as it was."
    lines = [line[4:] for line in match.group(0).strip("\n").splitlines()]
    if len(lines) <= LONG:
        return match.group(0)
    shown = "\n".join(lines).strip()
    return (f"\n<details>\n<summary><code>{lines[-1]}</code> (open for all of it)</summary>\n\n"
            f"```text\n{shown}\n```\n\n</details>\n\n")


parts = re.split(r"(^```.*?^```$)", body, flags=re.M | re.S)  # what stands in a fence is code, however it is indented
indented = re.compile(r"(?:^(?: {4}.*)?\n)+", re.M)
body = "".join(part if part.startswith("```") else indented.sub(folded, part) for part in parts)
body = re.sub(r"\]\(\.\./", "](", body)  # what lies above the notebooks lies beside the README
body = re.sub(r"\]\((\w+\.ipynb)", r"](nbs/\1", body)
note = "<!-- Written from nbs/index.ipynb by .ci/readme.py; edit the notebook. -->\n"
body = body.replace("```bash\n%%bash\n", "```bash\n")
(root / "README.md").write_text(note + body.strip() + "\n", encoding="utf-8")
