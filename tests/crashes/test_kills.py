"""A save killed at every operation: before it, in its middle, after it."""

import signal

import pytest

from fault_tolerant_transformer_lab.crashes import (
    Expectation,
    FailingDisk,
    Found,
    KillingDisk,
    continue_example,
    fail_everywhere,
    fail_once,
    in_child,
    in_parallel,
    kill_everywhere,
    violations,
)
from fault_tolerant_transformer_lab.publication import PublicationError, RecordingDisk


@pytest.mark.parametrize(("before", "background"), [(0, False), (3, False), (3, True)],
                         ids=["first save", "save with retention", "save in the background"])
def test_killed_at_every_operation_the_run_goes_on_as_the_same_run(memory_dir, before, background):
    tried = kill_everywhere(memory_dir, before, background)
    assert tried.lost == 0, tried.examples
    assert tried.tried >= 40 and tried.detail["operations"] >= 19


def test_the_judge_sees_each_broken_promise():
    expected = Expectation(acknowledged=3, begun=4, n_whole=2)
    assert violations(Found(3, (2, 3), ()), expected) == violations(Found(4, (3, 4), ()), expected) == []
    for found, told in [(Found(2, (1, 2), ()), "acknowledged step 3 is lost"),
                        (Found(0, (), ()), "a reader gets nothing"),
                        (Found(5, (4, 5), ()), "never saved"),
                        (Found(3, (2, 3), ("step-4",)), "not whole: step-4"),
                        (Found(3, (3,), ()), "1 whole checkpoints, expected 2"),
                        (Found(3, (2, 3), (), "disk"), "the next save fails: disk")]:
        assert told in "; ".join(violations(found, expected))


def test_a_kill_that_does_not_happen_is_noticed(memory_dir):
    ended = in_child(lambda: continue_example(memory_dir / "checkpoints", 1, KillingDisk(1000, "before")))
    assert ended.signal == 0 and ended.status == 0


def test_children_tell_their_result_their_error_and_their_signal():
    assert in_child(lambda: {"a": [1]}).value() == {"a": [1]}
    failed = in_child(lambda: 1 / 0)
    assert failed.status == 1 and "ZeroDivisionError" in failed.said
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        failed.value()
    assert in_child(lambda: signal.raise_signal(signal.SIGKILL)).signal == signal.SIGKILL
    assert in_parallel(lambda i, n: [i, n], 3) == [[0, 3], [1, 3], [2, 3]]


@pytest.mark.parametrize("before", [0, 3], ids=["first save", "save with retention"])
def test_every_errno_at_every_operation_is_told_costs_nothing_and_is_not_repeated(memory_dir, before):
    tried = fail_everywhere(memory_dir, before)
    assert tried.lost == 0, tried.examples
    assert tried.tried >= 150


def test_a_sync_that_is_tried_again_is_noticed(memory_dir):
    class Stubborn(FailingDisk):
        def fsync(self, fd):
            try:
                super().fsync(fd)
            except PublicationError:
                super().fsync(fd)

    store = memory_dir / "checkpoints"
    counted = RecordingDisk()
    continue_example(memory_dir / "counted", 1, counted)
    [k] = [k for k, record in enumerate(counted.records) if record.name == "fsync"]
    wrong = fail_once(store, 0, Stubborn(k, "EIO"))
    assert "fsync was tried again" in wrong and "no error was raised" in wrong
