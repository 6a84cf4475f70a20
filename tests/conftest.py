"""Options of all tests: `--long` (or FTTL_LONG=1) runs the versions that take many minutes."""

import os

import pytest


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", default=False, help="run the long tests as well")


def pytest_configure(config):
    config.addinivalue_line("markers", "long: takes many minutes; runs with --long or FTTL_LONG=1")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--long") or os.environ.get("FTTL_LONG") == "1":
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="long version not run: give --long or FTTL_LONG=1"))
