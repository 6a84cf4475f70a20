"""Build the site into `_docs`: `python docs/build.py`; with `--unless-current`, only where its sources have changed.

Chapters are the committed notebooks with their committed outputs; the reference and the errors are made from the code.
Nothing is executed, no network is used, a warning is an error, and so is a link inside the site that leads nowhere.
"""

import argparse
import hashlib
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
os.chdir(ROOT)  # nbdev looks for settings.ini from here

import chapters  # noqa: E402
import llms  # noqa: E402
import reference  # noqa: E402
from links import dead_links  # noqa: E402
from sphinx.cmd.build import build_main  # noqa: E402


def build(
    out: Path,  # replaced
    work: Path,  # where the pages are written for Sphinx; replaced
) -> list[str]:  # what is wrong; nothing where all is well
    "Write the pages, have Sphinx render them, and look at every link."
    for folder in (out, work):
        shutil.rmtree(folder, ignore_errors=True)
    source, html = work / "pages", work / "built" / "html"  # MyST-NB leaves a folder of its own beside what it builds
    source.mkdir(parents=True)
    chapters.write_pages(source)
    reference.write_api(source, lambda stem: chapters.numbered_title(chapters.NOTEBOOKS / f"{stem}.ipynb"))
    reference.write_errors(source)
    status = build_main(["-q", "-W", "--keep-going", "-E", "-j", "auto", "-b", "html", "-c", str(ROOT / "docs"),
                         "-d", str(work / "doctrees"), str(source), str(html)])
    if status:
        return [f"Sphinx ended with status {status}; its warnings are above"]
    shutil.move(html, out)
    llms.write(out, source)
    (out / ".nojekyll").touch()  # GitHub Pages would leave out folders that begin with an underscore
    return dead_links(out)


def digest_of_sources() -> str:
    "One digest over all that the site is made from."
    kinds = {".ipynb", ".py", ".css", ".json", ".png", ".svg"}
    files = [path for folder in ("nbs", "docs", reference.PACKAGE) for path in (ROOT / folder).rglob("*")
             if path.suffix in kinds and ".ipynb_checkpoints" not in path.parts]
    files += [path for name in [*chapters.PAGES, "settings.ini", "constraints.txt"] if (path := ROOT / name).exists()]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the site, without network, and without executing anything.")
    parser.add_argument("--unless-current", action="store_true", help="do nothing where it is that of these sources")
    asked = parser.parse_args()
    out, mark = ROOT / "_docs", ROOT / "_docs" / ".sources"
    digest = digest_of_sources()
    if asked.unless_current and mark.exists() and mark.read_text() == digest:
        return 0
    wrong = build(out, ROOT / "_proc")
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        mark.write_text(digest)
        print(f"{len(list(out.rglob('*.html')))} pages: {out.name}/index.html")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
