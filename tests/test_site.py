"""The site as a reader's browser meets it: every page at two widths, search, keys, links, and the page of errors."""

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("sphinx", reason="the site needs the docs extra")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
CHAPTERS = [path.stem for path in sorted((ROOT / "nbs").glob("[0-9]*.ipynb"))]
OTHERS = [path.stem for path in sorted((ROOT / "nbs").glob("[a-z]*.ipynb"))]
PAGES = [*OTHERS, *CHAPTERS, "errors", "api/index", "api/contract", "api/publication", "search", "genindex"]
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
OTHER_WIDTHS = (320, 740, 768, 1008, 1024, 1312, 1366, 1440, 1920)  # on both sides of where the theme rearranges a page
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")


@pytest.fixture(scope="session")
def site() -> Path:
    "The built site; it is built anew only where it is not that of these sources."
    subprocess.run([sys.executable, "docs/build.py", "--unless-current"], cwd=ROOT, check=True, timeout=600)
    return ROOT / "_docs"


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="session", params=WIDTHS)
def page(request: pytest.FixtureRequest, browser: Any) -> Iterator[Any]:
    "A tab of a desktop's width, then of a phone's; it keeps what went wrong in it."
    width, height = WIDTHS[request.param]
    context = browser.new_context(viewport={"width": width, "height": height}, has_touch=request.param == "phone")
    tab = context.new_page()
    tab.wrong = []
    tab.on("console", lambda said: tab.wrong.append(said.text) if said.type == "error" else None)
    tab.on("pageerror", lambda error: tab.wrong.append(str(error)))
    tab.on("requestfailed", lambda failed: tab.wrong.append(f"{failed.url} failed"))
    tab.on("request", lambda asked: tab.wrong.append(f"{asked.url} is elsewhere")
           if urlsplit(asked.url).hostname not in {"127.0.0.1", None, ""} else None)
    yield tab
    context.close()


def notebook(name: str) -> dict:
    path = ROOT / "nbs" / f"{name}.ipynb"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cells": []}


@in_a_browser
@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_whole_and_fits(name: str, page: Any, address: str) -> None:
    page.wrong.clear()
    page.goto(f"{address}/{name}.html", wait_until="load")
    assert page.wrong == []
    content, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert content <= window
    assert page.locator("article p").filter(has_text=re.compile(r"^\|")).count() == 0  # a table that is none
    assert page.locator("h1").count() == 1 or name == "search"
    plots = sum("image/png" in output.get("data", {}) for cell in notebook(name)["cells"]
                for output in cell.get("outputs", []))
    sizes = page.evaluate("[...document.querySelectorAll('.cell_output img')].map(i => "
                          "[Number(i.getAttribute('width')) || i.naturalWidth, i.width, i.alt])")
    assert len(sizes) == plots and all(width > 0 and alt not in {"", "Plot"} for width, _, alt in sizes), sizes
    assert all(shown >= min(width, 600) for width, shown, _ in sizes), "a plot whose words are too small to read"
    formulas = any(re.search(r"\$[^$\n]+\$", "".join(cell["source"])) for cell in notebook(name)["cells"]
                   if cell["cell_type"] == "markdown")
    assert (page.locator("math").count() > 0) == formulas
    assert page.locator("text=/\\\\(frac|sqrt|gamma|lfloor)/").count() == 0


@in_a_browser
def test_a_page_fits_every_width_between(browser: Any, address: str) -> None:
    tab = browser.new_page()
    for name in ("index", "03_contract", "api/publication", "errors"):
        tab.goto(f"{address}/{name}.html")
        for width in OTHER_WIDTHS:
            tab.set_viewport_size({"width": width, "height": 800})
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
            assert tab.evaluate("document.querySelector('article').clientWidth") >= 0.53 * width, (name, width)
    tab.close()


@in_a_browser
def test_searching_finds_an_error_class(page: Any, address: str) -> None:
    page.wrong.clear()
    page.goto(f"{address}/index.html")
    if not page.locator(".sidebar-search").is_visible():
        page.locator("label.nav-overlay-icon").first.click()
    page.locator(".sidebar-search").fill("CheckpointMismatchError")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a")
    found = page.locator("#search-results li a").evaluate_all("links => links.map(a => a.getAttribute('href'))")
    assert any("errors.html" in href for href in found) and any("03_contract.html" in href for href in found), found
    assert any("#fault_tolerant_transformer_lab.contract.CheckpointMismatchError" in href for href in found)
    assert page.wrong == []


@in_a_browser
def test_the_chapters_are_reached_by_the_keyboard_alone(page: Any, address: str) -> None:
    page.goto(f"{address}/index.html")
    reached = []
    for _ in range(250):
        page.keyboard.press("Tab")
        href = page.evaluate("document.activeElement.getAttribute('href') || ''")
        visible = page.evaluate("(r => r.width > 0 && r.height > 0)(document.activeElement.getBoundingClientRect())")
        if visible and (name := href.removesuffix(".html")) in CHAPTERS and name not in reached:
            reached.append(name)
    assert reached == CHAPTERS
    page.locator(f"a[href='{CHAPTERS[1]}.html']").last.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/{CHAPTERS[1]}.html")
    page.keyboard.press("ArrowRight")
    page.wait_for_url(f"**/{CHAPTERS[2]}.html")


@in_a_browser
def test_dark_and_light_both_have_contrast(page: Any, address: str) -> None:
    measure = """() => {
      const shade = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => v / 255).map(
        v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b };
      const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
        if (!c.endsWith(', 0)')) return c } return 'rgb(255, 255, 255)' };
      const found = [];
      for (const e of document.querySelectorAll('article p, article td, article pre span, .sidebar-tree a')) {
        if (!e.textContent.trim() || !e.getClientRects().length) continue;
        const [a, b] = [shade(getComputedStyle(e).color), shade(behind(e))].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < 4.5) found.push([ratio.toFixed(2), e.className, e.textContent.slice(0, 30)]);
      }
      return found }"""
    for theme in ("light", "dark"):
        page.goto(f"{address}/03_contract.html")
        page.evaluate(f"document.body.dataset.theme = '{theme}'")
        assert page.evaluate(measure) == [], theme


@in_a_browser
def test_a_name_in_the_text_leads_to_its_definition_and_from_there_to_its_chapter(
    page: Any, site: Path, address: str,
) -> None:
    target = "api/publication.html#fault_tolerant_transformer_lab.publication.CheckpointStore"
    link = f'<a class="reference internal" href="{target}"'
    page.goto(f"{address}/{next(name for name in CHAPTERS if link in (site / f'{name}.html').read_text())}.html")
    page.locator(f"article a.reference[href='{target}']").first.click()
    page.wait_for_url(f"**/{target}")
    page.locator("dl:has(> dt#fault_tolerant_transformer_lab\\.publication\\.CheckpointStore) a:has-text('the chapter')"
                 ).first.click()
    page.wait_for_url("**/05_publication.html#class-publication-checkpointstore")
    # The theme scrolls there smoothly.
    page.wait_for_function("(top => -1 <= top && top < innerHeight)"
                           "(document.getElementById(location.hash.slice(1)).getBoundingClientRect().top)")


def test_the_check_of_links_sees_dead_ones(tmp_path: Path) -> None:
    from links import dead_links

    (tmp_path / "a.html").write_text('<p id="here"></p><a href="b.html#there">x</a><a href="#here">y</a>'
                                     '<a href="https://example.org/none">z</a><img src="i.png">')
    (tmp_path / "b.html").write_text('<p id="there"></p><a href="a.html">x</a>')
    (tmp_path / "i.png").touch()
    assert dead_links(tmp_path) == []
    (tmp_path / "b.html").write_text('<a href="c.html">x</a><a href="../b.html">y</a>')
    (tmp_path / "i.png").unlink()
    assert dead_links(tmp_path) == [
        "a.html: b.html#there leads to no anchor", "a.html: i.png leads to no file",
        "b.html: ../b.html leads to no file", "b.html: c.html leads to no file"]


def test_programs_find_every_chapter_as_text(site: Path) -> None:
    listed = (site / "llms.txt").read_text()
    assert listed.startswith("# Fault-Tolerant Transformer Lab\n\n> ")
    pages = re.findall(r"^- \[.+\]\((.+)\): .", listed, re.M)
    assert {f"{name}.md" for name in CHAPTERS} < set(pages)
    assert all((site / page).read_text().strip() for page in pages)


def test_nothing_was_executed_and_no_output_was_lost(site: Path) -> None:
    for name in CHAPTERS:
        told = [line for cell in notebook(name)["cells"] if not "".join(cell["source"]).startswith("#| hide")
                for output in cell.get("outputs", []) if output.get("name") == "stdout"
                for line in output["text"][:1]]
        text = html.unescape(re.sub(r"<[^>]+>", "", (site / f"{name}.html").read_text()))
        for line in told:
            assert re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip()) in text, (name, line)


def test_the_front_page_says_how_a_proof_ended_whose_table_scrolls(site: Path) -> None:
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "index.html").read_text()))
    assert re.search(r"^It ends with: EQUIVALENT: all \d+ recovered runs .+ to the direct run$", text, re.M)


def test_the_errors_page_has_every_error_class_with_cause_and_remedy(site: Path) -> None:
    import reference

    import fault_tolerant_transformer_lab as lab

    errors = reference.error_classes()
    page = (site / "errors.html").read_text()
    offered = {name for name in lab.__all__ if isinstance(getattr(lab, name), type)
               and issubclass(getattr(lab, name), BaseException)}
    every = {name for room in reference.rooms() for name, thing in vars(reference.room(room)).items()
             if isinstance(thing, type) and issubclass(thing, BaseException) and not name.startswith("_")
             and thing.__module__ == reference.room(room).__name__ and name in reference.room(room).__all__}
    assert offered and offered <= every == set(errors)
    for name, error in errors.items():
        assert f'id="error-{name.lower()}"' in page, name
        assert error.cause.endswith(".") and error.remedy.endswith(".") and error.remedy not in error.cause, name
        assert error.messages or name == "ProofError" or any(name in other.bases for other in errors.values()), name


def test_the_errors_page_reads_messages_out_of_the_code() -> None:
    import reference

    errors = reference.error_classes()
    mismatch = errors["CheckpointMismatchError"].messages
    assert any(said.startswith("the checkpoint belongs to another experiment: ") for said in mismatch)
    # Through a function that makes the error, a class method, and an error that words itself.
    assert any("expected a JSON file, got a directory; name the file in it" in said
               for said in errors["ConfigError"].messages)
    assert any("is locked by ‹who›; wait until it ends" in said for said in errors["CheckpointLockedError"].messages)
    assert any(said.startswith("step ‹step›: expected a finite ‹quantity›") for said in
               errors["NonFiniteLossError"].messages)
