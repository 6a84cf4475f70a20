"""What the crash tests share."""

import os
import tempfile
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    "A forked child may use torch only where its parent has started no thread pool."
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def memory_dir(tmp_path):
    "A folder in memory where there is one: thousands of small saves are quick there."
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def not_run():
    "Say what the machine does not permit: a skip that the summary shows; a failure for root in CI, where all must run."

    def _told(reason):
        message = f"not run: {reason}"
        if os.environ.get("CI") == "true" and os.geteuid() == 0:
            pytest.fail(f"{message}; in CI, as root, every fault must be made")
        pytest.skip(message)

    return _told
