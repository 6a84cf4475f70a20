"""`llms.txt` and the pages as Markdown beside it, for readers that are programs (https://llmstxt.org)."""

from collections.abc import Iterator
from pathlib import Path

import chapters
import nbformat
import reference
from nbconvert import MarkdownExporter


def write(
    out: Path,  # the built site
    source: Path,  # the pages as Sphinx read them
) -> None:
    "Write the list of all pages, and each chapter as Markdown with its text outputs."
    (out / "llms.txt").write_text("\n".join(_listed(out, source)) + "\n", encoding="utf-8")


def _listed(out: Path, source: Path) -> Iterator[str]:
    yield f"# {reference.SETTINGS['title']}\n\n> {reference.SETTINGS['description']}\n"
    for name, paths in [*chapters.parts(), ("Other pages", chapters.other_notebooks())]:
        if paths:
            yield f"## {name}\n"
        for path in paths:
            page = f"{path.stem}.md"
            (out / page).write_text(_markdown(path), encoding="utf-8")
            yield f"- [{chapters.title_of(path)}]({page}): {chapters.promise_of(path)}"
        yield ""
    yield "## API\n"
    (out / "api").mkdir(exist_ok=True)
    for module in reference.rooms():
        page = f"api/{module}.md"
        (out / page).write_text((source / page).read_text(encoding="utf-8"), encoding="utf-8")
        yield f"- [{module}]({page}): {reference.room(module).__doc__}"
    (out / "errors.md").write_text((source / "errors.md").read_text(encoding="utf-8"), encoding="utf-8")
    yield "- [Errors](errors.md): each error class with its cause, its remedy and its messages"


def _markdown(path: Path) -> str:
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)  # a program reads the numbers that are printed beside it
    notebook.metadata["language_info"] = {"name": "python"}
    body, _ = MarkdownExporter().from_notebook_node(notebook)
    return body
