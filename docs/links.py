"""Every link and every reference of a built site that stays inside it: does it lead to something that is there?"""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    "The anchors that a page has, and the places it refers to."

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in {"href", "src"} and value:
                self.targets.add(value)

    handle_startendtag = handle_starttag


def dead_links(
    site: Path,  # a folder of HTML pages
) -> list[str]:  # one line for each link that leads nowhere, with the page it stands on
    "Find the links inside a site whose file or anchor is missing, and those that lead out of its folder."
    site = site.resolve()
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    dead = []
    for path, page in pages.items():
        for target in sorted(page.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            to = to / "index.html" if to.is_dir() else to
            anchor = unquote(parts.fragment)
            if not to.is_relative_to(site) or not to.exists():
                dead.append(f"{path.relative_to(site)}: {target} leads to no file")
            elif anchor and to in pages and anchor not in pages[to].anchors:
                dead.append(f"{path.relative_to(site)}: {target} leads to no anchor")
    return dead
