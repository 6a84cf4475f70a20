"""What the benchmarks take on their command lines, looked at before minutes are spent on measuring."""

import json
import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """Make a reader of whole numbers of at least `least`."""
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    return read


def chosen_from(names: str) -> Callable[[str], list[str]]:
    """Make a reader of some of these names, or "all", separated by commas; gives them in the order of `names`."""
    known = names.split(",")

    def read(text: str) -> list[str]:
        wanted = set(known if text == "all" else text.split(","))
        if odd := sorted(wanted - set(known)):
            raise ArgumentTypeError(f"expected some of {names}, or all, got {odd[0]!r}")
        return [name for name in known if name in wanted]

    return read


def folder(text: str) -> Path:
    """Read the path of a folder that is there and can be written into."""
    if not os.path.isdir(text) or not os.access(text, os.W_OK | os.X_OK):
        raise ArgumentTypeError(f"expected a folder that can be written into, got {text!r}")
    return Path(text)


def record(text: str) -> Path:
    """Read the path of the JSON file that will be written; one that is there must hold an object, which is kept."""
    path = Path(text)
    if text and not os.path.lexists(path):
        return path
    try:
        if isinstance(json.loads(path.read_text()), dict):
            return path
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(f"expected a JSON file with an object, or a new name, got {text!r} ({error})") from None
    raise ArgumentTypeError(f"expected a JSON file with an object, or a new name, got {text!r}")
