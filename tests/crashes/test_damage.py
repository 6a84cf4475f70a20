"""Damage, second writers, hostile names, copies: campaigns with counts, and judges that are shown able to fail."""

import collections
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fault_tolerant_transformer_lab import checkpoint_file, publication
from fault_tolerant_transformer_lab.checkpoint_file import MAX_HEADER_VALUES, CheckpointCorruptError, verify
from fault_tolerant_transformer_lab.contract import CheckpointError
from fault_tolerant_transformer_lab.crashes import (
    OPEN_DIRECTORIES,
    NotPermittedError,
    copies,
    damage_everywhere,
    flips,
    forgeries,
    greedy_reads,
    hostile_everywhere,
    hostile_once,
    memory_of,
    misplaced,
    open_to_others,
    peer_flips,
    places_of,
    sealed,
    stale_names,
    taken_apart,
    two_checkpoints,
    two_writers,
    undetected,
)


@pytest.mark.parametrize("n_flips", [10_000, pytest.param(200_000, marks=pytest.mark.long)])
def test_every_damage_is_found_with_its_place_and_costs_no_memory(memory_dir, n_flips):
    rows = {row.fault: row for row in damage_everywhere(memory_dir, n_flips, n_workers=2)}
    assert {row.fault: row.examples for row in rows.values() if row.lost} == {}
    assert rows["single-bit flips"].tried == n_flips
    assert rows["each byte of the header"].tried >= 4096
    assert len(rows) == 14 and all(row.tried >= 5 for row in rows.values())


def test_damaged_files_differ_from_the_sound_one_and_forgeries_pass_the_digest(memory_dir):
    good, other = two_checkpoints(memory_dir)
    everything = [*flips(good, 300), *flips(good, -1), *misplaced(good, other), *forgeries(good)]
    assert all(damage.data != good for damage in everything)
    reasons = collections.Counter()
    for damage in forgeries(good):
        if damage.kind != "absurd header sizes":
            (memory_dir / "forged").write_bytes(damage.data)
            with pytest.raises(CheckpointCorruptError) as refusal:
                verify(memory_dir / "forged")
            reasons[" ".join(str(refusal.value).split()[1:6])] += 1
    assert len(reasons) > 6, reasons
    assert not any("file digest" in reason for reason in reasons)


def test_what_is_sealed_unchanged_is_sound_and_the_judge_says_so(memory_dir):
    good, _ = two_checkpoints(memory_dir)
    header = taken_apart(good)
    again = sealed(header.text, header.data)
    assert again == good and header.text.count("0" * 64) == 1
    with pytest.raises(ValueError, match="'\"no such thing' is not in this header"):
        header.forged('"no such thing', "")
    (memory_dir / "again").write_bytes(again)
    assert undetected(memory_dir / "again") == ["it is taken for sound"]
    (memory_dir / "again").unlink()
    assert "FileNotFoundError instead of a refusal" in undetected(memory_dir / "again")[0]


def test_a_reader_that_never_says_where_or_blames_another_tensor_is_noticed(memory_dir):
    def silent(path):
        try:
            verify(path)
        except CheckpointError as error:
            raise CheckpointError("refused") from error

    def blaming(path):
        try:
            verify(path)
        except CheckpointCorruptError as error:
            error.where = "another tensor"
            raise

    good, _ = two_checkpoints(memory_dir)
    for reader, told in ((silent, "no place is named"), (blaming, "names 'another tensor', expected one of")):
        for damage in flips(good, 20):
            (memory_dir / "file").write_bytes(damage.data)
            assert undetected(memory_dir / "file", places_of(good, damage.data)) == []
            assert told in undetected(memory_dir / "file", places_of(good, damage.data), reader)[0]


def test_a_place_is_where_the_header_says_that_the_bytes_are():
    text = b'{"__metadata__":{},"a":{"data_offsets":[0,4]},"b":{"data_offsets":[4,8]}}'
    good = len(text).to_bytes(8, "little") + text + b"aaaabbbb"
    assert places_of(good, good[:-1] + b"x") == {"b"} and places_of(good, good[:-5] + b"xx" + good[-3:]) == {"a", "b"}
    assert "header" in places_of(good, good[:9] + b"x" + good[10:]) and "length" in places_of(good, good[:-1])


def test_a_greedy_reader_is_noticed_after_a_higher_peak_too(memory_dir):
    def greedy(path):
        taken = b"x" * (80 << 20)
        verify(path)
        return taken

    assert len(b"x" * (300 << 20)) == 300 << 20
    assert greedy_reads(memory_dir / "sound").lost == 0
    tried = greedy_reads(memory_dir / "greedy", greedy)
    assert tried.lost == tried.tried == 44 and "MiB were taken" in tried.examples[0]


def test_what_a_read_takes_of_memory_that_was_free_before_is_counted(memory_dir, not_run):
    if not Path("/proc/self/smaps_rollup").exists():
        not_run("what a process shares with its parent is counted by Linux only")

    def takes(path):
        assert len([str(i) * 3 for i in range(400_000)])

    measured = memory_of(memory_dir, takes)
    many = [str(i) * 3 for i in range(2_000_000)]
    few = many[::5000]  # they keep the others' memory with this process
    del many
    assert len(few) == 400 and 20 < measured < 60
    assert abs(memory_of(memory_dir, takes) - measured) <= 5 + measured // 5


def test_a_full_header_takes_what_the_limit_of_its_values_allows_and_one_beyond_it_is_not_taken_apart(
        memory_dir, monkeypatch):
    "The headers of `greedy_reads` claim what is not there. This one is full, up to a sixteenth of the real limit."
    path, header = memory_dir / "full", taken_apart(two_checkpoints(memory_dir / "run")[0])
    monkeypatch.setattr(checkpoint_file, "MAX_HEADER_VALUES", MAX_HEADER_VALUES // 16)
    room = MAX_HEADER_VALUES // 16 - sum(map(header.text.count, ",:[{"))

    def taken(n_keys):
        keys = ",".join(f'"{i}":0' for i in range(n_keys))
        path.write_bytes(header.forged(header.text, f'{header.text[:-1]},"x":{{{keys}}}}}'))
        return memory_of(path)

    n_most = room // 2 - 2  # a key takes a colon and a comma
    full, beyond = taken(n_most), taken(n_most + 10)
    assert 2 + 2 * beyond < full < 60, (full, beyond)  # MiB, for a header of 1.3


def test_peers_load_flipped_files_without_a_word(memory_dir):
    for counts in peer_flips(memory_dir, 100).values():
        assert counts["flips"] == 100 and counts["loaded"] >= 95


def test_second_writers(memory_dir):
    tried = two_writers(memory_dir, rounds=10)
    assert tried.lost == 0, tried.examples
    assert tried.tried == 70


def test_hostile_names(memory_dir, not_run):
    tried = hostile_everywhere(memory_dir)
    assert tried.lost == 0, tried.examples
    if tried.not_run:
        not_run(tried.not_run)
    assert tried.tried == 21


def test_a_reader_that_follows_a_link_to_a_sound_checkpoint_is_noticed(memory_dir, monkeypatch):
    monkeypatch.setattr(publication, "_regular", lambda generation: generation.path.resolve())
    wrong = hostile_once(memory_dir, "a symbolic link", "a checkpoint's name")
    assert "step 3 was taken from outside" in wrong


def test_a_reader_that_follows_a_hard_link_or_takes_another_users_file_is_noticed(memory_dir, monkeypatch, not_run):
    monkeypatch.setattr(publication, "_regular", lambda generation: generation.path)
    assert "step 3 was taken from outside" in hostile_once(memory_dir / "link", "a hard link", "a checkpoint's name")
    try:
        wrong = hostile_once(memory_dir / "foreign", "another user's file", "a checkpoint's name")
    except NotPermittedError as error:
        not_run(error.strerror)
    assert "step 3 was taken from outside" in wrong


def test_a_store_that_follows_a_linked_directory_or_says_nothing_of_others_is_noticed(memory_dir, monkeypatch):
    assert [open_to_others(memory_dir / f"sound {how}", how) for how in OPEN_DIRECTORIES] == [[], [], []]
    monkeypatch.setattr(publication, "_warn_about_permissions", lambda directory: None)
    monkeypatch.setattr(publication, "_no_link", lambda directory: directory.resolve())
    expected = ("a link to step 2 was followed", "told only []", "told only []")
    for how, told in zip(OPEN_DIRECTORIES, expected, strict=True):
        assert told in open_to_others(memory_dir / how, how)


def test_a_stale_file_under_a_newer_name_is_noticed_where_a_reader_believes_the_name(memory_dir, monkeypatch):
    assert stale_names(memory_dir / "sound").lost == 0
    monkeypatch.setattr(publication, "_require_step", lambda generation, step: None)
    tried = stale_names(memory_dir / "believed", (3, 99))
    assert tried.lost == tried.tried == 2 and "a reader gets 3" in tried.examples[0]


def test_a_forked_child_that_keeps_the_lock_of_its_killed_parent_is_noticed(memory_dir, monkeypatch):
    monkeypatch.setattr(publication.WriterLock, "forget", lambda lock: None)
    tried = two_writers(memory_dir, rounds=1)
    assert tried.lost == 1 and "a dead holder's forked child keeps the lock" in tried.examples[0]


def test_copies_with_any_timestamps_restore_the_same(memory_dir):
    tried = copies(memory_dir)
    assert tried.lost == 0 and tried.tried == 30, tried.examples


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    "A sound checkpoint's header text, with its digest zeroed, and its data."
    header = taken_apart(two_checkpoints(tmp_path_factory.mktemp("sound"))[0])
    return header.text, header.data, tmp_path_factory.mktemp("fuzzed") / "file"


PIECES = st.sampled_from(['"', "{", "}", "[", "]", ",", ":", "-1", "1e999", "NaN", "null", "true", "\\", "\\u0000",
                          "\\ud800", "9" * 30, '"F32"', '"BOOL"', '"shape":[]', "0" * 64, " " * 4096,
                          "__metadata__", "../"])
EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), PIECES | st.text(max_size=8)), min_size=1, max_size=5)


@settings(max_examples=500, deadline=None)
@given(edits=EDITS)
def test_no_header_crashes_the_parser_or_passes_for_another_state(sound, edits):
    text, data, path = sound
    changed = text
    for place, removed, inserted in edits:
        at = int(place * len(changed))
        changed = changed[:at] + inserted + changed[at + removed:]
    try:
        raw = sealed(changed, data)
    except UnicodeEncodeError:  # a lone surrogate: no file can hold it
        return
    path.write_bytes(raw)
    if changed != text and raw != sealed(text, data):
        try:
            assert verify(path).state_digest in text, "whatever still reads is still the same state"
        except CheckpointError as refusal:
            assert str(refusal)


RUNS = 20_000  # of the fuzzer where nobody gives it more time; about 10 s on one core


@pytest.mark.parametrize("limit", [f"-runs={RUNS}", pytest.param("-max_total_time=60", marks=pytest.mark.long)])
@pytest.mark.skipif(not importlib.util.find_spec("atheris"), reason="not run: atheris is not installed")
def test_coverage_guided_fuzzing_finds_no_header_that_crashes_the_parser(memory_dir, limit):
    if limit.startswith("-max_total_time") and (seconds := os.environ.get("FTTL_FUZZ_SECONDS")):
        limit = f"-max_total_time={seconds}"
    command = [sys.executable, Path(__file__).with_name("fuzz_header.py"), str(memory_dir), limit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    n_runs = re.search(r"Done (\d+) runs", done.stderr)
    assert n_runs and int(n_runs[1]) >= 1000, done.stderr[-1000:]


@pytest.mark.skipif(not importlib.util.find_spec("atheris"), reason="not run: atheris is not installed")
def test_the_fuzzer_ends_with_a_parser_that_falls_over(memory_dir):
    fuzz = Path(__file__).with_name("fuzz_header.py")
    broken = memory_dir / "broken.py"
    sound = "digest = verify(path).state_digest"
    broken.write_text(fuzz.read_text().replace(sound, f"{sound}\n        1 / 0"))
    done = subprocess.run([sys.executable, broken, str(memory_dir), "-runs=100"], capture_output=True, text=True,
                          check=False, cwd=memory_dir)
    assert done.returncode != 0 and "ZeroDivisionError" in done.stderr + done.stdout
