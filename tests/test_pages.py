"""The notebooks as a reader meets them: their form, their links, the README's code and figures."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from test_package import ROOMS

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = {path.stem: nbformat.read(path, as_version=4) for path in sorted((ROOT / "nbs").glob("*.ipynb"))}
PAGES = {"index", "glossary", "what_must_survive", "howto_plain_loop", "howto_pytest", "howto_preemptible",
         "howto_other_tools", "howto_diagnose"}  # export nothing
CHAPTERS = sorted(set(NOTEBOOKS) - PAGES)
LAST_HEADINGS = ["What this establishes, and what not", "To try"]


def slug(heading: str) -> str:
    "The name of a heading in a link."
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def text_of(name: str) -> str:
    "All markdown of a notebook."
    return "\n\n".join(cell.source for cell in NOTEBOOKS[name].cells if cell.cell_type == "markdown")


def headings_of(text: str) -> list[str]:
    "Headings below the title, code blocks left out."
    return re.findall(r"^##+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)


def links_of(text: str) -> list[str]:
    "Targets of a text's links into this project."
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", target)]


def directives_of(name: str) -> list[str]:
    "Every line that nbdev reads."
    return [line for cell in NOTEBOOKS[name].cells if cell.cell_type == "code"
            for line in cell.source.splitlines() if line.startswith("#|")]


def test_each_notebook_is_a_chapter_with_a_room_or_a_page_that_exports_nothing():
    assert set(NOTEBOOKS) >= PAGES and all(re.match(r"\d\d[a-z]?_", name) for name in CHAPTERS)
    rooms = [line.split()[-1] for name in CHAPTERS for line in directives_of(name) if "default_exp" in line]
    assert sorted(rooms) == sorted([*ROOMS, "pytest_plugin"])
    for name in PAGES:
        assert not [line for line in directives_of(name) if "export" in line or "default_exp" in line], name


@pytest.mark.parametrize("name", sorted(set(NOTEBOOKS)))
def test_a_notebook_opens_with_its_title_and_a_promise(name):
    first = next(cell.source for cell in NOTEBOOKS[name].cells if cell.cell_type == "markdown")
    assert re.match(r"# .+\n\n?> .+", first), first[:80]
    assert text_of(name).count("\n# ") == 0, "a second title"


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_ends_with_what_remains_open_and_two_exercises(name):
    assert headings_of(text_of(name))[-2:] == LAST_HEADINGS
    last = next(cell.source for cell in reversed(NOTEBOOKS[name].cells) if cell.cell_type == "markdown")
    established, _, exercises = last.partition("\n## To try\n")
    assert re.findall(r"^(\d)\. ", exercises, re.M) == ["1", "2"], exercises
    assert "**Not established" in established and "**Established" in established


@pytest.mark.parametrize("name", sorted(NOTEBOOKS))
def test_every_link_of_a_notebook_leads_somewhere(name):
    for target in links_of(text_of(name)):
        page, _, section = target.partition("#")
        path = ROOT / "nbs" / page if page else ROOT / "nbs" / f"{name}.ipynb"
        assert path.exists(), f"{name}: {target}"
        if section:
            assert section in map(slug, headings_of(text_of(path.stem))), f"{name}: {target}"


@pytest.mark.parametrize("name", sorted(NOTEBOOKS))
def test_what_one_cell_prints_is_stored_in_one_piece(name):
    for number, cell in enumerate(NOTEBOOKS[name].cells):  # a kernel divides it wherever it happened to send
        streams = [output.get("name") for output in cell.get("outputs", [])]
        divided = [a for a, b in zip(streams, streams[1:], strict=False) if a == b == "stdout"]
        assert not divided, f"cell {number}: put the pieces of its standard output together"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_link_of_a_document_leads_somewhere(document):
    for target in links_of((ROOT / document).read_text()):
        assert (ROOT / target.partition("#")[0]).exists(), target


def test_a_term_of_the_glossary_is_used_where_its_link_leads():
    terms = re.findall(r"^- \*\*(.+?)\*\*: (.+)$", text_of("glossary"), re.M)
    assert len(terms) > 50
    for term, meaning in terms:
        stem = re.split(r"[ ,]", term)[0].lower().removesuffix("s")
        for page in links_of(meaning):
            cells = NOTEBOOKS[page.partition(".")[0]].cells
            assert stem in "\n".join(cell.source for cell in cells).lower(), f"{term} is not in {page}"


def blocks_of(document: str, language: str) -> list[str]:
    "The code blocks of a document in one language."
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / document).read_text(), re.M | re.S)


def test_the_python_of_the_readme_runs_from_top_to_bottom(tmp_path):
    blocks = blocks_of("README.md", "python")
    assert len(blocks) == 2
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    readme = (ROOT / "README.md").read_text()
    told = [line for line in done.stdout.splitlines() if line]
    assert told[0] == "the same run" and told[-1].startswith("EQUIVALENT")
    assert all(line in readme for line in told), "the README shows another output"


def test_the_loop_of_the_readme_may_be_started_again_when_all_is_done(tmp_path):
    "A kill between the last save and the end leaves nothing to do, and that is no error."
    loop = blocks_of("README.md", "python")[0].partition("\nwith tempfile")[0]
    once_more = f"{loop}\ntrain({str(tmp_path / 'run')!r}, 2)\ntrain({str(tmp_path / 'run')!r}, 2)\n"
    done = subprocess.run([sys.executable, "-c", once_more], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "run").glob("step-*2.safetensors")] == ["step-00000002.safetensors"]


def test_the_contract_costs_ten_lines_in_the_readme():
    block = next(block for block in blocks_of("README.md", "python") if "#+" in block)
    assert sum(line.rstrip().endswith("#+") for line in block.splitlines()) == 10
    ast.parse(block)


def test_the_shell_of_the_readme_is_what_is_run_elsewhere():
    "The checks are CI's own command; `fttl prove` is a cell of the index, which nbdev_test executes."
    install = ".venv/bin/pip install --quiet --constraint constraints.txt ."
    prove = f"python3 -m venv .venv && {install} && .venv/bin/fttl prove"
    assert [block.strip() for block in blocks_of("README.md", "bash")] == [prove, "bash .ci/check", "fttl prove"]
    assert (ROOT / ".ci" / "check").exists() and "nbdev_test" in (ROOT / ".ci" / "check").read_text()
    [cell] = [cell.source for cell in NOTEBOOKS["index"].cells if cell.source.startswith("%%bash")]
    assert cell.splitlines() == ["%%bash", "#| slow", "fttl prove"]
    assert "--flags slow" in (ROOT / ".ci" / "check").read_text(), "or that cell would be left out"


@pytest.mark.long
def test_the_first_command_of_the_readme_prints_what_the_readme_shows(tmp_path):
    "In a clone of what is committed, from nothing: its own virtual environment, and all that it installs."
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "clone"], check=True)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["PATH"] = os.pathsep.join(folder for folder in env["PATH"].split(os.pathsep)
                                  if Path(folder).resolve() != Path(sys.prefix, "bin").resolve())
    done = subprocess.run(["bash", "-c", blocks_of("README.md", "bash")[0]], cwd=tmp_path / "clone", env=env,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in (ROOT / "README.md").read_text(), done.stdout


def test_the_picture_of_the_readme_is_the_one_of_the_index():
    import base64

    [figure] = [output.data["image/png"] for cell in NOTEBOOKS["index"].cells if cell.cell_type == "code"
                for output in cell.outputs if "image/png" in output.get("data", {})]
    assert (ROOT / "nbs" / "images" / "same_loss.png").read_bytes() == base64.b64decode(figure)
    assert "](nbs/images/same_loss.png)" in (ROOT / "README.md").read_text()


def test_the_count_of_the_tests_in_the_readme_is_the_recorded_one():
    readme = (ROOT / "README.md").read_text()
    checks = json.loads((ROOT / "benchmarks" / "results" / "checks.json").read_text())
    passed, skipped = checks["passed"], checks["skipped"]
    assert f"    {passed:,} passed, {sum(skipped.values())} skipped, with Python {checks['python']}\n" in readme
    assert all(f" {n} skipped: {reason}\n" in readme for reason, n in skipped.items())


def test_the_cost_in_the_readme_is_that_of_the_records():
    readme = (ROOT / "README.md").read_text()
    cost = json.loads((ROOT / "benchmarks" / "results" / "checkpoint_cost.json").read_text())
    for part, name in (("save", "CheckpointStore.save"), ("save", "torch.save + fsync + rename"),
                       ("blocking", "save(wait=False)"), ("blocking", "save(wait=False, overlap=True)"),
                       ("blocking", "DCP async_save, default"), ("restore", "CheckpointStore.restore")):
        row = cost[part]["rows"][name]
        assert re.search(rf"\| {row['median_s']:.2f} s \|.*\| {row['paired_ratio']:.2f} \|", readme), (
            f"{name}: benchmarks/results has other figures than the README; run index.ipynb and .ci/readme.py again")


def test_every_notebook_is_listed_on_the_front_page():
    listed = {target.partition(".")[0] for target in links_of(text_of("index"))}
    assert set(NOTEBOOKS) - {"index"} <= listed
