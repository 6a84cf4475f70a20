"The account of a run's time adds up, whatever the attempts did and whatever their file went through."

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fault_tolerant_transformer_lab.ledger import (
    PHASES,
    Account,
    Ledger,
    LedgerError,
    account_of,
    attempt_from_line,
    describe_account,
    duration,
    read_ledger,
)
from fault_tolerant_transformer_lab.publication import Disk


class HandClock:
    "Goes on only when told to."

    def __init__(self, now=1e9):
        self.now = now

    def __call__(self):
        return self.now


def attempt(path, clock, calendar, actions, start):
    "One attempt that does as told and is then forgotten, as a killed process forgets."
    ledger = Ledger(path, clock=clock, calendar=calendar)
    ledger.open(start)
    step = start
    for name, milliseconds in actions:
        if name == "step":
            step += 1
        with ledger.step(step) if name == "step" else ledger.phase(name):
            for one in {id(clock): clock, id(calendar): calendar}.values():  # they may be one
                one.now += milliseconds / 1000
    return ledger, step


ACTIONS = st.lists(st.tuples(st.sampled_from(["step", "step", "step", "stalled", "restoring"]),
                             st.integers(1, 10_000)), max_size=30)


@settings(max_examples=40, deadline=None)
@given(attempts=st.lists(st.tuples(ACTIONS, st.integers(0, 100_000), st.booleans()), min_size=1, max_size=4))
def test_phases_add_up_to_the_wall_time_over_killed_attempts(tmp_path_factory, attempts):
    path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
    clock, calendar = HandClock(5.0), HandClock()
    first, done, highest = calendar(), 0, 0
    for actions, pause, orderly in attempts:
        ledger, done = attempt(path, clock, calendar, actions, start=max(0, done - 3))
        if orderly:
            ledger.close("stopped")
        account = read_ledger(path)
        highest = max(highest, done)
        assert account.attempts[-1].highest <= highest
        calendar.now += pause / 1000
    # A line comes when half a per cent has passed, so up to a step's length may be hidden: never more.
    hidden = calendar() - pause / 1000 - account.attempts[-1].at
    assert 0 <= round(hidden, 6) <= 0.005 * (calendar() - first) + 10.1 + max([0, *(s for n, s in actions)])
    assert math.isclose(math.fsum(account.seconds.values()), account.attempts[-1].at - first, abs_tol=1e-4)
    assert abs(account.unexplained) < 1e-4 and account.adds_up(0.01) or account.wall_seconds < 0.01
    assert len(account.attempts) == len(attempts) and account.dropped == 0


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_file_cut_anywhere_is_the_account_of_an_earlier_moment(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
    clock, calendar = HandClock(5.0), HandClock()
    for start in (0, 4):
        attempt(path, clock, calendar, [("step", 1000)] * 5 + [("stalled", 100), ("step", 1000)], start)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    account = read_ledger(path)
    assert account.dropped == (0 if whole[:cut].endswith(b"\n") or cut == 0 else 1)
    assert account.adds_up(1e-6)
    attempt(path, clock, calendar, [("step", 1000)], 4)  # the next attempt starts from it, and leaves no torn line
    assert read_ledger(path).dropped == 0 and read_ledger(path).adds_up(1e-6)


def test_a_step_is_useful_once(tmp_path):
    clock, path = HandClock(), tmp_path / "ledger.jsonl"
    attempt(path, clock, clock, [("step", 1000)] * 6, 0)
    attempt(path, clock, clock, [("step", 1000)] * 4, 3)  # steps 4, 5, 6 again, and 7
    attempt(path, clock, clock, [("step", 1000)] * 2, 0)  # gone back on purpose: 1 and 2 again
    account = read_ledger(path)
    assert account.seconds["useful"] == 7.0 and account.seconds["replayed"] == 5.0
    assert [a.steps for a in account.attempts] == [
        {"useful": 6, "replayed": 0}, {"useful": 1, "replayed": 3}, {"useful": 0, "replayed": 2}]
    assert account.failures == 2 and account.goodput == 7 / 12


def test_another_source_may_know_of_higher_steps(tmp_path):
    clock = HandClock()
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=clock, calendar=clock)
    ledger.open(4, highest=6)  # the log of metrics had lines up to step 6
    for step in (5, 6, 7):
        with ledger.step(step):
            clock.now += 1.0
    assert ledger.account().attempts[-1].steps == {"useful": 1, "replayed": 2}


def test_nested_phases_exclude_each_other_and_a_failed_step_is_none(tmp_path):
    clock = HandClock()
    with pytest.raises(RuntimeError), Ledger(tmp_path / "ledger.jsonl", clock=clock, calendar=clock) as ledger:
        ledger.open(0)
        with ledger.phase("restoring"):
            clock.now += 1
            with ledger.phase("stalled"):
                clock.now += 2
                with ledger.phase("waiting"):
                    clock.now += 4
            clock.now += 8
        with ledger.step(1):
            clock.now += 16
            raise RuntimeError("the step failed")
    [only] = read_ledger(tmp_path / "ledger.jsonl").attempts
    assert only.seconds == {"useful": 16.0, "replayed": 0.0, "stalled": 2.0, "restoring": 9.0, "waiting": 4.0}
    assert (only.end, only.step, only.steps["useful"], only.entries["useful"]) == ("failed", 0, 0, 0)
    assert read_ledger(tmp_path / "ledger.jsonl").failures == 1


def test_a_call_that_does_nothing_leaves_no_mark(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl") as ledger, ledger.phase("restoring"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_is_not_counted_and_its_time_is(tmp_path):
    clock = HandClock()
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=clock, calendar=clock)
    ledger.open(0)
    with pytest.raises(OSError), ledger.phase("stalled"):
        clock.now += 3
        raise OSError("no space")
    [now] = ledger.account().attempts
    assert now.entries["stalled"] == 0 and now.seconds["stalled"] == 3.0


def test_unknown_phase_is_refused():
    expected = "expected one of useful, replayed, stalled, restoring, waiting, got 'idle'"
    with pytest.raises(LedgerError, match=expected), Ledger("nowhere").phase("idle"):
        pass


def test_a_suspended_machine_shows_as_unexplained(tmp_path):
    clock, calendar, path = HandClock(5.0), HandClock(), tmp_path / "ledger.jsonl"
    ledger, _ = attempt(path, clock, calendar, [("step", 1000)] * 9, 0)
    calendar.now += 3.0  # the lid was closed: only the calendar went on
    ledger.close("finished")
    account = read_ledger(path)
    assert math.isclose(account.unexplained, 3.0) and not account.adds_up()
    assert "unexplained  25.0%  3.0 s: the machine was suspended" in describe_account(account)


def test_a_calendar_set_back_is_no_negative_time(tmp_path):
    clock, calendar, path = HandClock(5.0), HandClock(), tmp_path / "ledger.jsonl"
    attempt(path, clock, calendar, [("step", 1000)] * 9, 0)
    calendar.now -= 5.0
    attempt(path, clock, calendar, [("step", 1000)] * 9, 9)
    account = read_ledger(path)
    assert account.gaps == [0.0] and account.seconds["useful"] == 18.0
    assert math.isclose(account.unexplained, -5.0) and not account.adds_up()


@pytest.mark.parametrize("back", [18.0, 1000.0])
def test_a_calendar_set_back_by_all_the_time_and_more_is_told_too(tmp_path, back):
    clock, calendar, path = HandClock(5.0), HandClock(), tmp_path / "ledger.jsonl"
    attempt(path, clock, calendar, [("step", 1000)] * 9, 0)
    calendar.now -= back
    attempt(path, clock, calendar, [("step", 1000)] * 9, 9)
    told = describe_account(read_ledger(path))
    assert told.startswith("ledger: 0 s since the first start, 2 attempts") and "unexplained      ?  -" in told


def test_links_and_pipes_are_refused_and_hard_links_spared(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    opened = len(os.listdir("/proc/self/fd"))
    for name in ("fifo", "folder"):
        with pytest.raises(LedgerError, match=f"{name}: expected a run's ledger.*found something else"):
            read_ledger(tmp_path / name)
    assert len(os.listdir("/proc/self/fd")) == opened
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LedgerError, match="found a symbolic link; move it away"):
        Ledger(tmp_path / "link").open(0)
    clock, path = HandClock(), tmp_path / "ledger.jsonl"
    attempt(path, clock, clock, [("step", 1000)], 0)
    os.link(path, tmp_path / "copy")
    before = (tmp_path / "copy").read_bytes()
    attempt(path, clock, clock, [("step", 1000)], 0)
    assert (tmp_path / "copy").read_bytes() == before and len(read_ledger(path).attempts) == 2


class Failing(Disk):
    "Fails every operation of one name."

    def __init__(self, name):
        super().__init__()
        self.fails = name

    def operation(self, name, path, call):
        if name == self.fails:
            raise OSError(5, "Input/output error")
        return call()


@pytest.mark.parametrize("name", ["write", "fsync", "create", "replace", "close", "sync_directory", "open_ledger"])
def test_a_failing_disk_does_not_end_the_run(tmp_path, name, caplog):
    clock = HandClock()
    with Ledger(tmp_path / "ledger.jsonl", Failing(name), clock=clock, calendar=clock) as ledger:
        ledger.open(0)
        for step in (1, 2):
            with ledger.step(step):
                clock.now += 1
            with ledger.phase("stalled"):
                clock.now += 1
        assert ledger.account().seconds["useful"] == 2.0
    assert ledger.problem and "EIO" in ledger.problem and name in ledger.problem
    assert len(caplog.records) == 1
    attempt(tmp_path / "ledger.jsonl", clock, clock, [("step", 1000)], 2)  # and the next attempt works
    assert read_ledger(tmp_path / "ledger.jsonl").adds_up(1e-6)


def test_every_line_is_json_of_known_shape(tmp_path):
    clock, path = HandClock(), tmp_path / "ledger.jsonl"
    attempt(path, clock, clock, [("step", 1000), ("stalled", 10)], 0)
    lines = path.read_bytes().splitlines(keepends=True)
    for line in lines:
        assert set(json.loads(line)["seconds"]) == set(PHASES) and attempt_from_line(line) is not None
        for cut in range(len(line)):
            assert attempt_from_line(line[:cut]) is None
    assert path.stat().st_mode & 0o777 == 0o600


@given(st.binary(max_size=200))
def test_any_bytes_are_no_attempt(data):
    assert attempt_from_line(data) is None and attempt_from_line(data + b"\n") is None


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3))


@given(field=st.sampled_from(["number", "began", "at", "step", "highest", "seconds", "steps", "entries", "end"]),
       value=JSON)
def test_a_changed_field_is_accepted_only_where_it_is_a_number_of_its_kind(field, value):
    good = {"number": 1, "began": 1.0, "at": 2.0, "step": 0, "highest": 0, "seconds": dict.fromkeys(PHASES, 0.5),
            "steps": {"useful": 0, "replayed": 0}, "entries": dict.fromkeys(PHASES, 0), "end": "running"}
    found = attempt_from_line(json.dumps(good | {field: value}).encode() + b"\n")
    whole = type(value) is int and 0 <= value < 2**63
    real = type(value) in (int, float) and 0 <= value < 1e15
    assert (found is not None) == (whole if field in ("number", "step", "highest") else
                                   real if field in ("began", "at") else False)


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from fault_tolerant_transformer_lab.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
ledger.open(0)
print("begun", flush=True)
for step in range(1, 10**6):
    with ledger.step(step):
        time.sleep(0.002)
    if step % 5 == 0:
        with ledger.phase("stalled"):
            time.sleep(0.002)
"""


def test_killed_from_outside_at_any_moment_it_adds_up(tmp_path):
    path = tmp_path / "ledger.jsonl"
    for pause in (0.05, 0.23):
        child = subprocess.Popen([sys.executable, "-c", SCRIPT, path], stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "begun\n"
        time.sleep(pause)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    account = read_ledger(path)
    assert account.dropped == 0 and account.adds_up(0.01) and account.failures == 1
    first, second = account.attempts
    assert first.step > 0 and second.steps["replayed"] == min(first.step, second.step)
    assert first.at - first.began <= second.began - first.began


def test_the_empty_account_and_the_words_for_durations():
    assert describe_account(Account(())) == "ledger: nothing was written down yet"
    assert describe_account(account_of([b"{}\n", b"garbage"])) == "ledger: 2 lines, not one of them whole"
    assert [duration(x) for x in (0.00012, 59.0, 90 * 60, 48 * 3600, 86_400 * 400)] == [
        "120 us", "59.0 s", "1 h 30 min", "2 d 00 h", "400 d 00 h"]


@given(st.floats(0, 1e10))
def test_durations_never_show_sixty_of_anything(seconds):
    text = duration(seconds)
    assert not text.endswith(("60 s", "60 min", "24 h")) or text == "60.0 s"
