"""Notebooks as pages: nbdev's own processors read its directives, MyST-NB's tags carry them on. Nothing is executed."""

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from execnb.nbio import mk_cell, read_nb, write_nb
from nbdev.process import NBProcessor, Processor
from nbdev.processors import filter_stream_, hide_, hide_line, rm_header_dash, strip_ansi, strip_hidden_metadata
from reference import PACKAGE, REPOSITORY, definition_anchor, folded_parameters

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "nbs"

# Chapters are read in the order of their numbers, and each number belongs to one part.
PARTS = (
    ("The contract", range(0, 4)),
    ("The file and its publication", range(4, 6)),
    ("The run and the proof", range(6, 8)),
    ("Crashes", range(8, 9)),
    ("Larger state", range(9, 10)),
    ("The command line", range(10, 11)),
    ("Many processes", range(11, 12)),
    ("What it costs", range(12, 100)),
)
# How-to pages in a reader's order; any other comes after them.
HOWTO = ("howto_plain_loop", "howto_pytest", "howto_preemptible", "howto_other_tools", "howto_diagnose")
# Pages of the site that come from files of the repository's root.
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}

_TAGS = {"export": "exported", "exports": "exported", "exporti": "exported", "slow": "slow"}
_QUARTO = {("echo:", "false"): "remove-input", ("output:", "false"): "remove-output",
           ("include:", "false"): "remove-cell", ("code-fold:", "true"): "hide-input"}
_READ_ELSEWHERE = {"default_exp", "hide", "hide_line", "filter_stream", "eval:", "code-summary:"}


LONG_OUTPUT, LONG_IMPORTS = 40, 12  # lines; longer outputs scroll, longer lists of imports are folded


def _only_imports(source: str) -> bool:
    "Whether a cell brings names in and does nothing else."
    if not source.startswith(("import ", "from ")):
        return False
    plain = (ast.Import, ast.ImportFrom, ast.If, ast.Try)  # under TYPE_CHECKING, or guarded
    return all(isinstance(statement, plain) for statement in ast.parse(source).body)


class Tags(Processor):
    "Turns each directive into the tag by which MyST-NB, or the style sheet, does what it says; refuses unknown ones."

    def cell(self, cell: object) -> None:
        if cell.cell_type != "code":
            return
        cell.source = "\n".join(line for line in cell.source.splitlines() if not line.startswith("#|")).strip("\n")
        tags = []
        for name, values in cell.directives_.items():
            tag = _TAGS.get(name) or _QUARTO.get((name, " ".join(values).lower()))
            known = name in _READ_ELSEWHERE or name.endswith(":") or cell.source.startswith(f"%%{name}")
            if tag is None and not known:
                raise ValueError(f"#| {name}: expected a directive that the site knows; add it to docs/chapters.py")
            tags += [tag] if tag else []
        told = "".join("".join(output.get("text", "")) for output in cell.get("outputs", []))
        tags += ["message"] if told and not re.search(r"\S {2,}\S", told) else []
        tags += ["scroll-output"] if told.count("\n") > LONG_OUTPUT else []
        tags += ["hide-input"] if cell.source.count("\n") > LONG_IMPORTS and _only_imports(cell.source) else []
        cell.metadata["tags"] = tags
        if not cell.source and not cell.get("outputs"):
            del cell["source"]


class Alternatives(Processor):
    "Gives each plot the text that a reader hears who cannot see it: its titles, which by the house's rule say it all."

    def cell(self, cell: object) -> None:
        if cell.cell_type == "code" and any("image/png" in output.get("data", {}) for output in cell.outputs):
            cell.metadata["mystnb"] = {"image": {"alt": _told(cell) or "; ".join(_titles(cell.source)) or "Plot"}}


def _told(cell: object) -> str:
    "What the cell itself says of its picture, by Quarto's `#| fig-alt: ...`."
    return " ".join(cell.directives_.get("fig-alt:", []))


def _titles(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", "")
            given = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "title")]
            for value in given if name in {"set_title", "suptitle", "title", "set"} else []:
                if isinstance(value, ast.JoinedStr):
                    yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in value.values)
                elif isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value


class Definitions(Processor):
    "Marks where each public name is built, and folds its documented parameters below it, as a table."

    def begin(self) -> None:
        module = next((cell.directives_["default_exp"][0] for cell in self.nb.cells
                       if "default_exp" in cell.directives_), None)
        cells = []
        for cell in self.nb.cells:
            names = _defined(cell) if module and cell.directives_.keys() & {"export", "exports"} else []
            anchors = "\n\n".join(f"({definition_anchor(module, name)})=" for name in names)
            cells += [mk_cell(anchors, "markdown")] if anchors else []
            cells.append(cell)
            if module and cell.cell_type == "markdown" and cell.source.startswith("# "):
                cells.append(mk_cell(_facts(module), "markdown"))
            tables = "\n\n".join(filter(None, (folded_parameters(module, name) for name in names)))
            cells += [mk_cell(tables, "markdown")] if tables else []
        for cell in cells:
            if not hasattr(cell, "directives_"):
                cell.directives_ = {}
        self.nb.cells = cells


def _facts(module: str) -> str:
    "What a reader may want to open beside a chapter."
    return (f'<p class="chapter-facts">Exports <code>{PACKAGE}.{module}</code>; '
            f'<a href="api/{module}.html">its reference</a></p>')


def _defined(cell: object) -> list[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in ast.parse(cell.source).body if isinstance(node, kinds) and node.name[0] != "_"]


_LINK = re.compile(r"""(?<=\]\()(?P<target>[^()\s]+)(?=\))|(?<=src=")(?P<image>[^"\s]+)(?=")""")


def relinked(
    text: str,  # Markdown
    folder: Path,  # the folder whose relative links these are
) -> str:  # the same text, linking to pages of the site where there are some, else to the repository
    "Point relative links at pages of the site, or at the file in the repository on the web."
    def target(match: re.Match) -> str:
        link = match["target"] or match["image"]
        parts = urlsplit(link)
        if parts.scheme or not parts.path:
            return link
        path = (folder / parts.path).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            raise ValueError(f"{link}: expected a file of this repository, found none; mend the link")
        name = path.relative_to(ROOT).as_posix()
        anchor = f"#{parts.fragment}" if parts.fragment else ""
        if path.is_relative_to(NOTEBOOKS):
            return path.relative_to(NOTEBOOKS).as_posix() + anchor
        return (PAGES.get(name) or f"{REPOSITORY}/{'tree' if path.is_dir() else 'blob'}/main/{name}") + anchor

    pieces = re.split(r"(```.*?```|`[^`]*`)", text, flags=re.S)  # code stays as it is
    pieces[::2] = [_LINK.sub(target, piece) for piece in pieces[::2]]
    return "".join(pieces)


def processed(
    path: Path,  # a notebook of the repository
) -> object:  # the same as a reader sees it
    "Apply the directives of a notebook, and add what the site shows beside them."
    processor = NBProcessor(path, procs=[
        Definitions, strip_ansi, hide_line, filter_stream_, rm_header_dash, hide_, strip_hidden_metadata, Tags,
        Alternatives])
    processor.process()
    notebook = processor.nb
    notebook.cells = list(_with_last_lines(notebook.cells))
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = relinked(cell.source, NOTEBOOKS)
    notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    return notebook


def _with_last_lines(cells: list) -> Iterator[object]:
    "All cells; after a command whose output scrolls, the last line of it, which says how it ended."
    for cell in cells:
        yield cell
        if cell.cell_type == "code" and "scroll-output" in cell.metadata["tags"] and cell.source.startswith("%%bash"):
            told = "".join("".join(output.get("text", "")) for output in cell.outputs)
            yield mk_cell(f"It ends with: `{told.strip().splitlines()[-1]}`", "markdown")


def title_of(
    path: Path,  # a notebook
) -> str:
    "The first heading of a notebook."
    for cell in read_nb(path).cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^# (.+)$", cell.source, re.M)):
            return found[1].strip()
    raise ValueError(f"{path.name}: expected a heading of the first level, found none")


def promise_of(
    path: Path,  # a notebook
) -> str:  # one line, without its mark
    "The quoted line below the title, which says what the notebook promises."
    for cell in read_nb(path).cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^> (.+(?:\n> .+)*)", cell.source, re.M)):
            return " ".join(line.removeprefix("> ").strip() for line in found[1].splitlines())
    return ""


def chapters() -> list[Path]:
    "The numbered notebooks in reading order."
    return sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))


def parts() -> list[tuple[str, list[Path]]]:
    "Each part with its chapters, in order."
    return [(name, [path for path in chapters() if int(re.match(r"\d+", path.name)[0]) in numbers])
            for name, numbers in PARTS]


def other_notebooks() -> list[Path]:
    "How-to pages, the glossary and all else that has no number."
    return [path for path in sorted(NOTEBOOKS.glob("[a-z]*.ipynb")) if path.stem != "index"]


def numbered_title(
    path: Path,  # a chapter
) -> str:
    "A chapter's title behind its number, as the navigation shows it."
    return f"{path.name.partition('_')[0]} {title_of(path)}"


def write_pages(
    folder: Path,  # where Sphinx reads; made if need be
) -> None:
    "Write every notebook, processed, into `folder`."
    if (NOTEBOOKS / "images").exists():
        shutil.copytree(NOTEBOOKS / "images", folder / "images")
    for path in [*chapters(), *other_notebooks(), NOTEBOOKS / "index.ipynb"]:
        notebook = processed(path)
        if path.stem == "index":
            notebook.cells += [mk_cell(text, "markdown") for text in _contents()]
        write_nb(notebook, folder / path.name)
    for name, page in PAGES.items():
        if (ROOT / name).exists():
            (folder / page).write_text(relinked((ROOT / name).read_text(encoding="utf-8"), ROOT), encoding="utf-8")


def _contents() -> Iterator[str]:
    "The tables of contents behind the navigation at the side."
    def toctree(caption: str, entries: list[str]) -> str:
        listed = "\n".join(entries)
        return f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```"

    for name, paths in parts():
        if paths:
            yield toctree(name, [f"{numbered_title(path)} <{path.stem}>" for path in paths])
    howto = [path for path in other_notebooks() if path.stem.startswith("howto_")]
    howto.sort(key=lambda path: [*HOWTO, path.stem].index(path.stem))
    if howto:
        short = {path.stem: title_of(path).removeprefix("How to ") for path in howto}
        yield toctree("How to", [f"{title[:1].upper()}{title[1:]} <{stem}>" for stem, title in short.items()])
    rest = [path.stem for path in other_notebooks() if path not in howto]
    pages = [Path(page).stem for name, page in PAGES.items() if (ROOT / name).exists()]
    yield toctree("Reference", [*rest, "errors", "api/index", *pages])
