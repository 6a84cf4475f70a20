"""Every state that a file system may leave after power loss: the model, the mutants, and the real store on each."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from fault_tolerant_transformer_lab import crashes
from fault_tolerant_transformer_lab.crashes import (
    BLOCK,
    LARGE_BLOCKS,
    MUTANTS,
    PROFILES,
    SCALES,
    STATES_OF,
    BrokenSync,
    CachedDisk,
    Expectation,
    FileSystem,
    NotingDisk,
    PageCache,
    Way,
    as_if_large,
    contents_after,
    convict,
    crash_states,
    distinct_states,
    judge_states,
    record_saves,
    states_after,
)
from fault_tolerant_transformer_lab.publication import Recorded, RecordingDisk

# The model, against states written down by hand


def op(name, path, target=None, data=None, offset=None, error=None):
    n_bytes = None if data is None else len(data)
    return Recorded(name, Path("/r") / path, target and Path("/r") / target, offset, n_bytes, data, name, error)


def states(profile, *records, files=None):
    system = FileSystem(profile, Path("/r"), files)
    for record in records:
        system.apply(record)
    return {tuple(sorted(state.items())) for state in states_after(system)}


def test_nothing_pending_leaves_one_state():
    assert states("weak", files={"a": b"x"}) == {(("a", b"x"),)}


def test_an_unsynced_file_may_be_absent_empty_zeros_garbage_or_whole():
    found = states("weak", op("create", "a"), op("write", "a", data=b"xy", offset=0))
    assert found == {(), (("a", b""),), (("a", b"\0\0"),), (("a", b"\xa5\xa5"),), (("a", b"xy"),)}


def test_fsync_of_the_file_pins_bytes_and_length_and_not_the_name():
    found = states("weak", op("create", "a"), op("write", "a", data=b"xy", offset=0), op("fsync", "a"))
    assert found == {(), (("a", b"xy"),)}


def test_fsync_of_the_directory_pins_names_and_not_bytes():
    found = states("weak", op("create", "a"), op("write", "a", data=b"x", offset=0), op("sync_directory", "."))
    assert found == {(("a", b""),), (("a", b"\0"),), (("a", b"\xa5"),), (("a", b"x"),)}


def test_blocks_are_torn_apart_from_each_other():
    old, new = b"o" * (2 * BLOCK), b"n" * (2 * BLOCK)
    found = states("ordered", op("write", "a", data=new, offset=0), files={"a": old})
    assert {dict(state)["a"] for state in found} == {
        a + b for a, b in itertools.product((b"o" * BLOCK, b"n" * BLOCK), repeat=2)}


def test_names_keep_their_order_in_one_profile_only():
    records = op("replace", "a", target="b"), op("unlink", "c")
    files = {"a": b"1", "c": b"3"}
    before, renamed, both = (("a", b"1"), ("c", b"3")), (("b", b"1"), ("c", b"3")), (("b", b"1"),)
    assert states("ordered", *records, files=files) == {before, renamed, both}
    assert states("weak", *records, files=files) == {before, renamed, both, (("a", b"1"),)}


def test_a_rename_may_leave_both_names_or_neither_where_it_is_not_atomic():
    found = states("non-atomic rename", op("replace", "a", target="b"), files={"a": b"1"})
    assert found == {(("a", b"1"),), (("b", b"1"),), (("a", b"1"), ("b", b"1")), ()}
    assert len(states("weak", op("replace", "a", target="b"), files={"a": b"1"})) == 2


def test_a_file_in_a_directory_that_never_arrived_is_not_there():
    found = states("weak", op("make_directory", "d"), op("create", "d/a"))
    assert found == {(), (("d", None),), (("d", None), ("d/a", b""))}


def test_a_failed_fsync_leaves_blocks_that_no_later_fsync_writes():
    file = PageCache()
    file.write(0, b"x")
    file.fsync(failed=True)
    file.fsync(failed=False)
    assert set(contents_after(file)) == {b"\0", b"x"}
    file.write(0, b"y")
    file.fsync(failed=False)
    assert contents_after(file) == [b"y"], "a block that is written again is written again"


def test_a_failed_close_leaves_bytes_that_no_sync_has_made_certain():
    written = op("create", "a"), op("write", "a", data=b"xy", offset=0), op("fsync", "a"), op("sync_directory", ".")
    assert states("weak", *written, op("close", "a")) == {(("a", b"xy"),)}
    found = states("weak", *written, op("close", "a", error="EIO"))
    assert {(("a", b""),), (("a", b"\0\0"),), (("a", b"xy"),)} < found


def test_failed_operations_change_nothing():
    assert states("weak", op("unlink", "a", error="EIO"), files={"a": b"x"}) == {(("a", b"x"),)}


# The real store


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_missing_line_is_caught(memory_dir, mutant):
    caught = convict(mutant, memory_dir)
    assert caught is not None and caught.wrong
    by_hand = {
        "no fsync of the file": "acknowledged step 5 is lost",
        "no fsync of the directory": "acknowledged step 5 is lost",
        "no temporary name": "published and not whole: step-00000005",
        "rename before fsync": "published and not whole: step-00000005",
        "retention before publication": "2 whole checkpoints, expected 3",
        "retention before the directory sync": "2 whole checkpoints, expected 3",
        "no fsync above a new directory": "acknowledged step 1 is lost: a reader gets nothing",
        "fsync retried": "acknowledged step 5 is lost",
        "error of close not believed": "acknowledged step 5 is lost",
    }
    assert by_hand[mutant] in caught.wrong[0] and set(by_hand) == set(MUTANTS)


WAYS = [(Way("async"), None), (Way("overlapped"), None), (Way(), NotingDisk), (Way(), CachedDisk)]
WAY_NAMES = ["in the background", "overlapped", "past the page cache", "large, through the page cache"]


@pytest.mark.parametrize(("way", "large"), WAYS, ids=WAY_NAMES)
def test_every_state_of_a_save_in_the_background_or_of_a_large_file_keeps_every_promise(memory_dir, way, large):
    (memory_dir / "recorded").mkdir()
    with as_if_large() if large else nullcontext():
        disk = (large or NotingDisk)(keep_data=True)
        recording = record_saves(memory_dir / "recorded", before=3, saves=2, disk=disk, n_blocks=4, way=way)
        found = distinct_states(recording)
        tried = judge_states(recording, found, memory_dir, n_workers=2)
    assert tried.tried == len(found) > 150 and tried.lost == 0, tried.examples
    names = [record.name for record in recording.records]
    assert names.count("start_writeback") == (2 if large is CachedDisk else 0)  # one a save
    assert getattr(disk, "direct", False) == (large is NotingDisk)


@pytest.mark.parametrize(("way", "large"), WAYS, ids=WAY_NAMES)
@pytest.mark.parametrize("mutant", ["no fsync of the file", "no fsync of the directory"])
def test_a_missing_sync_is_caught_in_each_way_too(memory_dir, monkeypatch, way, large, mutant):
    if large is CachedDisk:
        monkeypatch.setattr(MUTANTS[mutant], "set_direct", CachedDisk.set_direct)
    with as_if_large() if large else nullcontext():
        caught = convict(mutant, memory_dir, way=way)
    assert "acknowledged step 5 is lost" in caught.wrong[0]


def test_states_of_writes_past_the_page_cache_are_not_claimed_where_there_are_none(memory_dir, monkeypatch):
    [name] = [name for name, (_, disk_type) in STATES_OF.items() if disk_type is NotingDisk]
    monkeypatch.setattr(crashes, "STATES_OF", {name: STATES_OF[name]})
    little = replace(SCALES["quick"], n_blocks=2)
    [tried] = crashes._states_rows(memory_dir / "direct", little, 1, False)
    assert tried.detail["direct"] and tried.tried > 20 and tried.lost == 0
    monkeypatch.setattr(RecordingDisk, "set_direct", lambda disk, fd, on: not on)
    [tried] = crashes._states_rows(memory_dir / "cached", little, 1, False)
    assert (tried.fault, tried.tried, tried.not_run) == (name, 0, "this file system writes nothing past the page cache")


def test_lengths_are_put_back_and_small_files_take_the_calls_of_large_ones(memory_dir):
    def calls(name, n_blocks, disk_type=NotingDisk):
        (memory_dir / name).mkdir()
        disk = disk_type()
        record_saves(memory_dir / name, before=0, saves=1, disk=disk, n_blocks=n_blocks)
        files = [record.name for record in disk.records if record.path.name.endswith(".tmp")]
        return getattr(disk, "direct", False), [call for call, _ in itertools.groupby(files)]

    with as_if_large():
        small, cached = calls("as if large", 4), calls("as if large, cached", 4, CachedDisk)
    assert small == calls("large", LARGE_BLOCKS) == (True, ["create", "write", "fsync", "close", "replace"])
    early = ["create", "write", "start_writeback", "write", "fsync", "close", "replace"]
    assert cached == calls("large, cached", LARGE_BLOCKS, CachedDisk) == (False, early)
    assert calls("small", 4)[0] is False


@pytest.mark.parametrize("profile", PROFILES)
def test_crashes_after_the_last_save_are_looked_at_first(memory_dir, profile):
    disk = RecordingDisk(keep_data=True)
    recording = record_saves(memory_dir, before=3, saves=1, disk=disk, n_blocks=2)
    promises = [promise for _, promise, _ in crash_states(recording, profile)]
    assert promises[0] == Expectation(4, 4, 3) and promises[-1] == Expectation(3, 3, 3)
    assert Expectation(3, 4, 3) in promises


def test_ten_thousand_states_of_saves_with_retention_keep_every_promise(memory_dir):
    disk = RecordingDisk(keep_data=True)
    (memory_dir / "recorded").mkdir()
    recording = record_saves(memory_dir / "recorded", before=3, saves=2, disk=disk, n_blocks=10)
    assert [record.name for record in recording.records].count("unlink") == 2
    found = distinct_states(recording)
    assert len(found) >= 10_000
    tried = judge_states(recording, found, memory_dir, n_workers=2)
    assert tried.tried == len(found) and tried.lost == 0, tried.examples


@pytest.mark.parametrize("nth", [1, 2])
def test_after_a_failed_fsync_the_store_writes_anew_and_loses_nothing(memory_dir, nth):
    (memory_dir / "recorded").mkdir()
    disk = BrokenSync(keep_data=True, nth=nth)
    recording = record_saves(memory_dir / "recorded", before=3, saves=2, disk=disk, n_blocks=3)
    assert any(record.error == "EIO" for record in recording.records)
    found = distinct_states(recording)
    tried = judge_states(recording, found, memory_dir)
    assert tried.tried > 80 and tried.lost == 0, tried.examples


@pytest.mark.parametrize("broken", ["verify", "resume"])
def test_a_reader_or_writer_that_falls_over_is_lost_with_its_state_and_the_campaign_goes_on(
        memory_dir, monkeypatch, broken):
    def fall_over(*anything):
        raise IndexError("a mistake of ours")

    (memory_dir / "recorded").mkdir()
    disk = RecordingDisk(keep_data=True)
    recording = record_saves(memory_dir / "recorded", before=1, saves=1, disk=disk, n_blocks=1)
    found = distinct_states(recording)
    if broken == "verify":
        monkeypatch.setattr(crashes, "verify", fall_over)  # read where a store holds a second checkpoint
    else:
        monkeypatch.setattr(crashes.CheckpointStore, "restore", fall_over)
    tried = judge_states(recording, found, memory_dir)
    assert tried.tried == len(found) >= tried.lost > 0
    assert "IndexError: a mistake of ours" in tried.examples[0]
    assert "on the device: {'" in tried.examples[0] and "step-0000000" in tried.examples[0]
    assert not (memory_dir / "worker-0").exists()


def test_every_state_of_a_first_save(memory_dir):
    (memory_dir / "recorded").mkdir()
    disk = RecordingDisk(keep_data=True)
    recording = record_saves(memory_dir / "recorded", before=0, saves=1, disk=disk, n_blocks=4)
    found = distinct_states(recording)
    assert {} in [state.content for state in found.values()], "not even the directory was there"
    tried = judge_states(recording, found, memory_dir)
    assert tried.tried > 60 and tried.lost == 0, tried.examples
