"""Sphinx's settings, and what it lacks here: formulas without JavaScript, and links from names in the text."""

import re
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

sys.path.insert(0, str(Path(__file__).resolve().parent))
from reference import PACKAGE, REPOSITORY, SETTINGS, built_in, definitions, room, rooms

project = SETTINGS["title"]
author = SETTINGS["author"]
project_copyright = SETTINGS["copyright"]
version = release = SETTINGS["version"]
extensions = ["myst_nb", "sphinx.ext.linkcode", "sphinx_copybutton"]
source_suffix = {".ipynb": "myst-nb", ".md": "myst-nb"}
exclude_patterns = ["jupyter_execute"]
nb_execution_mode = "off"  # the committed outputs are what is shown
nb_merge_streams = True
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"  # of what is folded: long lists of imports
nb_render_markdown_format = "myst"  # else a table among the outputs would be shown as text
myst_enable_extensions = ["dollarmath", "attrs_inline", "attrs_block"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
smartquotes = False
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"

html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["lab.css"]
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": SETTINGS["branch"],
    "source_directory": f"{SETTINGS['nbs_path']}/",
    "top_of_page_buttons": ["view"],
    "navigation_with_keys": True,
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    "The line of the repository on the web where a name of the reference is defined."
    if domain != "py" or not info["fullname"]:
        return None
    module = info["module"].removeprefix(f"{PACKAGE}.")
    node = definitions(module).get(info["fullname"])
    return node and f"{REPOSITORY}/blob/{SETTINGS['branch']}/{PACKAGE}/{module}.py#L{node.lineno}"


def _mathml(text: str, **options: Any) -> str:
    "A formula as MathML, which every browser sets by itself."
    if bare := re.search(r"\\(frac|binom|sqrt)(?!\{|\[)", text):  # read as another formula, and without a word
        raise ValueError(f"{text}: expected braces after {bare[0]}, found none: write \\frac{{1}}{{2}}")
    return tex2mathml(text, **options)


def _visit_math(self: Any, node: nodes.math) -> None:
    self.body.append(_mathml(node.astext()))
    raise nodes.SkipNode


def _visit_displaymath(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{_mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


class QualifyTypes(SphinxPostTransform):
    "Gives each type in a signature the module that it has in the code, where two modules have one name for two things."

    default_priority = 5

    def run(self, **_: Any) -> None:
        for wanted in self.document.findall(addnodes.pending_xref):
            if wanted.get("refdomain") == "py" and wanted.get("py:module"):
                wanted["reftarget"] = _full_name(wanted["reftarget"], wanted["py:module"]) or wanted["reftarget"]


class LinkNames(SphinxPostTransform):
    """Makes a link of each name in backticks that the reference knows: what this chapter's module calls so, else what
    the package offers, else what only one module has."""

    default_priority = 20

    def run(self, **_: Any) -> None:
        known = self.env.domaindata["py"]["objects"]
        module = {built_in(name): name for name in rooms()}.get(self.env.docname, Path(self.env.docname).name)
        for literal in list(self.document.findall(nodes.literal)):
            full = _full_name(literal.astext().removesuffix("()"), module, known)
            if full not in known or known[full].docname == self.env.docname or self._within(literal):
                continue
            page = known[full].docname
            literal.replace_self(make_refnode(
                self.app.builder, self.env.docname, page, known[full].node_id, literal.deepcopy(), full))

    def _within(self, literal: nodes.Node) -> bool:
        while literal := literal.parent:
            if isinstance(literal, nodes.reference | nodes.title):
                return True
        return False


def _full_name(name: str, module: str, known: Iterable[str] = ()) -> str:
    "The name with its module in front, as the code of `module` would find it; empty where it would not."
    head = name.partition(".")[0]
    places = [room(module.removeprefix(f"{PACKAGE}."))] if module.removeprefix(f"{PACKAGE}.") in rooms() else []
    for place in [*places, import_module(PACKAGE)]:
        thing = getattr(place, head, None) if head.isidentifier() else None
        if str(getattr(thing, "__module__", "")).startswith(f"{PACKAGE}."):
            return f"{thing.__module__}.{name}"
    found = [full for full in known if full.partition(".")[2].partition(".")[2] == name]
    return found[0] if len(found) == 1 else ""


def _source_of_chapters_only(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    "A page that is made from code has no source of its own to link to."
    if not (Path(app.confdir).parent / SETTINGS["nbs_path"] / f"{page}.ipynb").exists():
        context["page_source_suffix"] = None


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (_visit_math, None), (_visit_displaymath, None))
    app.add_post_transform(QualifyTypes)
    app.add_post_transform(LinkNames)
    app.connect("html-page-context", _source_of_chapters_only)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


