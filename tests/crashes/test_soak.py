"""Random kills of real training runs, and the table."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fault_tolerant_transformer_lab import crashes, publication
from fault_tolerant_transformer_lab.cli import failure
from fault_tolerant_transformer_lab.crashes import (
    CAMPAIGNS,
    CHAIN,
    KILLED_RUNS,
    LONGEST,
    MODES,
    MUTANTS,
    REAL_FAULTS,
    SCALES,
    SOAK,
    STATES_OF,
    WORKING_ROOM,
    Caught,
    NoRoomError,
    Reference,
    Report,
    Tried,
    Watched,
    attempt,
    broken_by_kills,
    copies,
    crashtest,
    damage_everywhere,
    fail_everywhere,
    fail_really,
    hostile_everywhere,
    in_child,
    kill_everywhere,
    losses,
    outdated,
    peer_flips,
    power_cuts,
    remove_stale,
    roomy,
    soak,
    source_digests,
    two_writers,
    undisturbed,
    working_folder,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("kills", [300, pytest.param(1000, marks=pytest.mark.long)])
def test_runs_killed_at_random_moments_end_as_the_undisturbed_run(memory_dir, kills):
    tried = soak(memory_dir / "soak", kills=kills, n_workers=2, progress_bar=False)
    assert tried.tried == kills and tried.lost == 0, tried.examples
    assert CHAIN <= tried.detail["longest_chain"] <= LONGEST and tried.detail["runs"] >= kills / LONGEST
    recovering = tried.detail["phases"]["recovering"] + tried.detail["phases"].get("starting", 0)
    assert recovering < kills / 2, tried.detail  # most kills find a run that trains or saves
    assert {"recovering", "during_write"} <= set(tried.detail["phases"]), tried.detail
    assert set(tried.detail["modes"]) == set(MODES), tried.detail
    assert not (memory_dir / "soak").exists()


@pytest.mark.parametrize("campaign", [
    lambda path: soak(path, kills=2, progress_bar=False), lambda path: kill_everywhere(path, 0),
    lambda path: fail_everywhere(path, 0), lambda path: damage_everywhere(path, 1), lambda path: peer_flips(path, 1),
    lambda path: two_writers(path, 1), hostile_everywhere, copies, fail_really,
], ids=["soak", "kills", "errnos", "damage", "peers", "writers", "hostile", "copies", "real faults"])
def test_a_folder_with_somebodys_files_is_refused_and_left_alone(tmp_path, campaign):
    (tmp_path / "thesis.txt").write_text("kept for years")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="expected an empty or new folder, found 2 entries in .*; name another path"):
        campaign(tmp_path)
    assert {path.name for path in tmp_path.rglob("*")} == {"thesis.txt", "checkpoints"}
    with pytest.raises(ValueError, match="expected an empty or new folder, got a file"):
        campaign(tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "kept for years"


@pytest.mark.parametrize("ended", [None, SystemExit, KeyboardInterrupt])
def test_soak_removes_only_what_it_made(memory_dir, monkeypatch, ended):
    "Even what somebody puts into its folder while it runs stays, and so does a folder that was there."
    def _soak_in_parallel(directory, *others):
        (directory / "worker-0" / "run-0").mkdir(parents=True)
        (directory / "notes.txt").write_text("kept")
        if ended is not None:
            raise ended
        return Tried("soak", 1)

    monkeypatch.setattr(crashes, "_soak_in_parallel", _soak_in_parallel)
    for place in (memory_dir / "there", memory_dir / "new"):
        if place.name == "there":
            place.mkdir()
        with suppress(SystemExit, KeyboardInterrupt):
            soak(place, kills=1, progress_bar=False)
        assert [path.name for path in place.rglob("*")] == ["notes.txt"]


def test_a_bar_counts_the_kills_where_one_is_wanted(memory_dir, capfd):
    few = SOAK.replace(steps=12)
    soak(memory_dir / "quiet", kills=1, config=few, progress_bar=False)
    assert capfd.readouterr().err == ""
    soak(memory_dir / "shown", kills=1, config=few, progress_bar=True)
    told = capfd.readouterr().err
    assert "0/1" in told and "1/1" in told and "kill" in told


def test_no_run_is_killed_more_than_ten_times(memory_dir, monkeypatch):
    "Delays of nothing: without a limit all the kills would hit one run that never gets anywhere."
    monkeypatch.setattr(crashes.random.Random, "uniform", lambda self, low, high: 0.0)
    tried = soak(memory_dir / "soak", kills=2 * LONGEST + 1, config=SOAK.replace(steps=12), progress_bar=False)
    assert (tried.detail["runs"], tried.detail["longest_chain"], tried.lost) == (3, LONGEST, 0), tried.examples


def test_a_kill_that_is_timed_from_the_first_step_does_not_hit_the_start(memory_dir):
    watched = Watched()
    assert attempt(SOAK, memory_dir / "run", watched, 0.0, from_start=False) and watched.phase != "starting"
    assert attempt(SOAK, memory_dir / "run", watched, 0.0) and watched.phase == "starting"


def test_memory_with_too_little_room_is_not_worked_in(memory_dir, tmp_path, monkeypatch):
    usage = type(crashes.shutil.disk_usage(memory_dir))
    monkeypatch.setattr(crashes.shutil, "disk_usage", lambda path: usage(WORKING_ROOM, 0, WORKING_ROOM))
    assert roomy(memory_dir) == memory_dir and roomy(memory_dir / "nowhere") is None
    assert crashes.no_room_in(memory_dir) == ""
    monkeypatch.setattr(crashes.shutil, "disk_usage", lambda path: usage(64 << 20, 0, 64 << 20))
    assert roomy(memory_dir) is None
    monkeypatch.setattr(crashes, "with_private_mounts", lambda work: (None, "mkfs: No space left on device"))
    for tried in power_cuts(tmp_path / "power"):
        assert "64 MiB are free" in tried.not_run and "--directory" in tried.not_run


def test_what_a_killed_campaign_left_in_memory_is_removed_before_room_is_looked_for(tmp_path, monkeypatch):
    stale = tmp_path / "fttl-crashtest-stale"
    stale.mkdir()
    monkeypatch.setattr(crashes, "_MEMORY", tmp_path)
    monkeypatch.setattr(crashes, "roomy", lambda: None if stale.exists() else tmp_path)
    assert crashes.place_to_work(None, ["copies"]) == tmp_path and not stale.exists()


def test_a_cgroup_whose_limit_cannot_be_written_is_removed(memory_dir, monkeypatch):
    groups = memory_dir / "groups"
    groups.mkdir()
    monkeypatch.setattr(crashes, "memory_cgroup", lambda: (groups, "no/limit", "events"))
    tried = crashes.out_of_memory(memory_dir / "work")
    assert "limit" in tried.not_run and list(groups.iterdir()) == []


def test_a_run_is_killed_five_times_even_where_no_kill_comes_in_time(memory_dir, monkeypatch):
    "A delay so long that every attempt would be through: the steps at which a kill is due do it alone."
    monkeypatch.setattr(crashes.random.Random, "uniform", lambda self, low, high: 600.0)
    tried = soak(memory_dir / "soak", kills=CHAIN, config=SOAK.replace(steps=12), progress_bar=False)
    assert (tried.tried, tried.lost) == (CHAIN, 0), tried.examples
    assert (tried.detail["runs"], tried.detail["longest_chain"]) == (1, CHAIN)


def test_a_run_that_ends_otherwise_is_noticed(memory_dir):
    config = SOAK.replace(steps=4)
    reference = undisturbed(config, memory_dir / "reference")
    assert not attempt(config, memory_dir / "run", Watched(), None)
    assert broken_by_kills(memory_dir / "run", reference) == []
    other = Reference("0" * 64, reference.metrics, 0)
    assert broken_by_kills(memory_dir / "run", other) == ["the final state is another one"]
    log = memory_dir / "run" / "metrics.jsonl"
    log.write_bytes(log.read_bytes() + log.read_bytes().splitlines(keepends=True)[-1])
    assert broken_by_kills(memory_dir / "run", reference) == [
        "the metrics log does not have each step once", "the metrics log has other bytes"]


def test_a_run_that_fails_by_itself_is_an_error_and_not_a_kill(memory_dir):
    (memory_dir / "run").mkdir()
    (memory_dir / "run" / "checkpoints").write_text("in the way")
    with pytest.raises(RuntimeError, match="not a directory|NotADirectory"):
        attempt(SOAK, memory_dir / "run", Watched(), None)


def test_a_checkpoint_of_a_step_that_no_attempt_has_computed_is_noticed(memory_dir, monkeypatch):
    monkeypatch.setattr(crashes.random.Random, "uniform", lambda self, low, high: 600.0)
    monkeypatch.setattr(Watched, "computed", property(lambda self: 1))
    tried = soak(memory_dir / "soak", kills=CHAIN, config=SOAK.replace(steps=12), progress_bar=False)
    assert "which was never saved" in " ".join(tried.examples)


def test_lost_counts_kills_and_never_more_than_were_tried(memory_dir, monkeypatch):
    monkeypatch.setattr(crashes, "broken_by_kills", lambda *anything: ["another state"])
    tried = soak(memory_dir / "soak", kills=CHAIN, config=SOAK.replace(steps=12), progress_bar=False)
    assert tried.tried == CHAIN and tried.lost == tried.detail["runs"] and "another state" in tried.examples[0]


@pytest.mark.parametrize("campaign", ["soak", "crashtest", "fttl soak"])
def test_sigterm_leaves_no_process_and_no_folder(memory_dir, tmp_path, campaign):
    program = f"""
import sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from fault_tolerant_transformer_lab.crashes import crashtest, soak
place = Path({str(memory_dir)!r})
print("ready", flush=True)
if {campaign!r} == "fttl soak":
    from fault_tolerant_transformer_lab.cli import main
    sys.exit(main(["soak", "--kills", "100000", "--jobs", "2"]))
elif {campaign!r} == "soak":
    soak(place / "soak", kills=100_000, n_workers=2, progress_bar=False)
else:
    crashtest(scale="full", only=["soak"], directory=place, progress_bar=False)
"""
    done = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True,
                            env={**os.environ, "TMPDIR": str(memory_dir), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    try:
        assert done.stdout.readline() == "ready\n"
        for _ in range(3000):
            with suppress(FileNotFoundError):  # a run that is through goes while we look
                if len(list(memory_dir.rglob("metrics.jsonl"))) >= 2:  # the reference is through, a worker has begun
                    break
            time.sleep(0.02)
        assert list(memory_dir.iterdir())
        done.send_signal(signal.SIGTERM)
        assert done.wait(60) == 128 + signal.SIGTERM
        for _ in range(500):
            try:
                os.killpg(done.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.02)
        with pytest.raises(ProcessLookupError):
            os.killpg(done.pid, 0)
        assert list(memory_dir.iterdir()) == []
    finally:
        with suppress(ProcessLookupError):
            os.killpg(done.pid, signal.SIGKILL)
        done.wait()


def test_the_watched_child_tells_where_it_is():
    watched = Watched()
    watched("after_publication", 7)
    assert (watched.phase, watched.acknowledged) == ("after_publication", 7)
    watched.start()
    assert (watched.phase, watched.acknowledged) == ("starting", 7)


def test_the_table_counts_what_was_tried_lost_and_not_run():
    report = Report("quick", [Tried("kills", 1000, 0), Tried("cuts", not_run="no loop device"), Tried("flips", 9, 2)])
    lines = report.table().splitlines()
    assert lines[2].split() == ["kills", "1,000", "0"] and lines[3].split() == ["flips", "9", "2"]
    assert "not run: cuts: no loop device" in lines
    assert report.lost == 2 and report.to_plain()["lost"] == 2
    report.uncaught.append("no fsync")
    assert report.lost == 3 and "NOT CAUGHT" in report.table()


def test_what_our_own_store_loses_beside_the_peers_counts_as_lost():
    assert Report("quick", peers={"CheckpointStore": {"ext4": {"old": 10}}}).lost == 10
    peers = {"torch.save": {"ext4": {"old": 10}}, "CheckpointStore": {"ext4": {"new": 9}}}
    assert Report("quick", peers=peers).lost == 0


def test_what_broke_is_named_and_cuts_beside_the_peers_are_tried_too():
    report = Report("quick", [Tried("kills", 3, 1, ["after write: step 2 is lost"]), Tried("flips", 9)], uncaught=["x"],
                    peers_beside={"CheckpointStore": {"xfs": {"new": 2, "nothing": 1}}}, peers="no loop device")
    assert (report.tried, report.lost) == (3 + 9 + 1 + 3, 3)
    assert losses(report) == ["after write: step 2 is lost", "mutant x was not caught",
                              "with a neighbour's fsync before, xfs: CheckpointStore has nothing"]
    assert Report("quick", [Tried("cuts", not_run="no root")], peers="no root", peer_flips={"a": {}}).tried == 0


def test_a_recorded_report_is_read_again_and_names_what_was_left_out():
    report = Report("full", [Tried("kills", 3)], left_out=["states"], about={"torch": "2"})
    again = Report.from_plain(report.to_plain())
    assert again == report and again.table().splitlines()[-1] == "not run at the scale full: states"


def test_the_table_says_what_each_peer_found_and_counts_both_kinds_of_cut():
    alone = {"torch.save": {"ext4": {"old": 2}, "xfs": {"new": 1, "nothing": 1}},
             "CheckpointStore": {"ext4": {"new": 2}, "xfs": {"new": 2}}}
    beside = {"CheckpointStore": {"ext4": {"new": 1, "nothing": 1}}}
    report = Report("quick", peers=alone, peers_beside=beside)
    lines = report.table().splitlines()
    assert report.lost == 1
    assert lines[2].split()[-2:] == ["4", "3"] and lines[2].startswith("power cut after it returned: torch.save")
    assert ["torch.save", "old", "new", "1,", "nothing", "1"] in [line.split() for line in lines]
    assert Report("quick", peers="no loop device", peers_beside="no loop device").not_run == [
        "power cuts of peers: no loop device"]


def whole_report(scale):
    "A report of this very code in which everything ran."
    report = Report(scale, campaigns=list(CAMPAIGNS), source=source_digests(), peers_beside={"CheckpointStore": {}})
    detail = {"modes": dict.fromkeys(MODES, 1), "runs": SCALES[scale].kills // LONGEST}
    report.rows = [Tried(KILLED_RUNS, SCALES[scale].kills, detail=detail),
                   Tried("errnos of real faults", len(REAL_FAULTS)), *map(Tried, STATES_OF)]
    report.mutants = [Caught(name, 1, "", (), {}) for name in MUTANTS]
    return report


def test_a_report_speaks_for_the_code_and_not_for_where_a_notebook_divides_it(tmp_path, monkeypatch):
    there = tmp_path / "copy"
    shutil.copytree(Path(publication.__file__).parent, there, ignore=shutil.ignore_patterns("__pycache__"))
    before = source_digests()
    monkeypatch.setattr(publication, "__file__", str(there / "publication.py"))
    assert source_digests() == before
    text = (there / "publication.py").read_text()
    (there / "publication.py").write_text(text.replace("\n# %% ", "\n\n# %% ../nbs/another.ipynb "))
    assert source_digests() == before
    (there / "publication.py").write_text(text.replace("os.replace", "os.rename"))
    changed = source_digests()
    assert [name for name in before if changed[name] != before[name]] == ["publication.py"]


def test_a_report_of_other_code_or_of_a_part_is_outdated():
    assert SCALES["full"].kills >= 1000 and outdated(whole_report("full")) == outdated(whole_report("ci")) == []
    assert {"crashes.py", "publication.py", "checkpoint_file.py", "contract.py", "staging.py", "training.py",
            "equivalence.py"} < set(source_digests())
    for name, value, told in [
        ("source", {**source_digests(), "publication.py": "0"}, "publication.py has changed"),
        ("source", {**source_digests(), "staging.py": "0"}, "staging.py has changed"),
        ("source", {}, "crashes.py has changed"),
        ("campaigns", [name for name in CAMPAIGNS if name != "power"], "not known to have run: power"),
        ("mutants", [], "mutants not tried: error of close not believed"),
        ("rows", whole_report("ci").rows, "300 kills of runs, saving sync, async, overlapped"),
        ("rows", [Tried(KILLED_RUNS, 1000, detail={"runs": 4})], "1000 kills in 4 runs"),
        ("rows", [], "0 kills of runs, saving in one way"),
        ("rows", [], "not all of the 9 faults of the kernel"),
        ("rows", [], "not known to have been enumerated: crash states after power loss"),
        ("peers_beside", {}, "no power cut of peers after a neighbour's fsync"),
    ]:
        report = whole_report("full")
        setattr(report, name, value)
        assert told in "; ".join(outdated(report)), name


@pytest.mark.parametrize("scale", ["ci", "full"])
def test_the_recorded_reports_are_read_and_lost_nothing(scale):
    report = Report.from_plain(json.loads((RESULTS / f"crashtest_{scale}.json").read_text()))
    assert report.scale == scale and report.lost == 0 and len(report.table().splitlines()) > 10


@pytest.mark.long
@pytest.mark.parametrize("scale", ["ci", "full"])
def test_the_recorded_reports_speak_for_this_code(scale):
    report = Report.from_plain(json.loads((RESULTS / f"crashtest_{scale}.json").read_text()))
    assert outdated(report) == []


def test_a_killed_campaign_leaves_nothing_for_longer_than_until_the_next(tmp_path):
    def killed():
        with working_folder(tmp_path) as folder:
            (folder / "image").write_bytes(b"x")
            signal.raise_signal(signal.SIGKILL)

    assert in_child(killed).signal == signal.SIGKILL
    [left] = [path.name for path in tmp_path.iterdir()]
    others = ["crashtest-by-somebody", "fttl-crashtest-file"]
    (tmp_path / others[0]).mkdir()
    (tmp_path / others[1]).write_text("kept for years")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "fttl-crashtest-link").symlink_to(elsewhere)
    with working_folder(tmp_path) as living:
        (living / "file").write_bytes(b"x")
        assert not (tmp_path / left).exists()
        assert in_child(lambda: remove_stale(tmp_path)).value() == [], "a living process' folder stays"
        assert (living / "file").exists()
    assert {path.name for path in tmp_path.iterdir()} == {*others, "elsewhere", "fttl-crashtest-link"}


@pytest.mark.skipif(os.geteuid() != 0, reason="not run: only root can make another user's folder")
def test_another_users_folder_is_not_removed(tmp_path):
    folder = tmp_path / "fttl-crashtest-theirs"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    assert remove_stale(tmp_path) == [] and folder.exists()
    os.chown(folder, 0, 0)
    assert remove_stale(tmp_path) == [folder.name] and not folder.exists()


def test_a_folder_that_is_taken_for_stale_as_it_is_made_is_made_again(tmp_path, monkeypatch):
    made = []

    def mkdtemp(dir, prefix):
        made.append(tempfile_mkdtemp(dir=dir, prefix=prefix))
        if len(made) == 1:
            os.rmdir(made[0])  # by another process, which found it without a lock
        return made[-1]

    tempfile_mkdtemp = crashes.tempfile.mkdtemp
    monkeypatch.setattr(crashes.tempfile, "mkdtemp", mkdtemp)
    with working_folder(tmp_path) as folder:
        assert len(made) == 2 and str(folder) == made[1] and folder.is_dir()


@pytest.mark.parametrize(("only", "told"), [
    (None, "expected 512 MiB of free room in .*, got 64 MiB; free some, .* or choose others than peers and power"),
    (["copies"], "expected 128 MiB of free room in .*, got 64 MiB; free some, name another folder$")])
def test_a_folder_with_too_little_room_is_refused_before_anything_is_tried(tmp_path, monkeypatch, only, told):
    usage = type(crashes.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(crashes.shutil, "disk_usage", lambda path: usage(64 << 20, 0, 64 << 20))
    with pytest.raises(NoRoomError, match=told):
        crashtest(scale="quick", only=only, directory=tmp_path, progress_bar=False)
    assert list(tmp_path.iterdir()) == []
    status, line = failure(NoRoomError("--directory: no room"))
    assert (status, line) == (2, "--directory: no room")


def test_one_campaign_by_name_and_an_unknown_scale(tmp_path):
    report = crashtest(scale="quick", only=["copies"], directory=tmp_path, progress_bar=False)
    assert [row.fault for row in report.rows] == ["copies with other timestamps"] and report.lost == 0
    assert list(tmp_path.iterdir()) == []
    assert report.campaigns == ["copies"] and report.source == source_digests()
    with pytest.raises(ValueError, match="expected one of quick, ci, full, got 'huge'"):
        crashes.crashtest(scale="huge")
    with pytest.raises(ValueError, match="only: expected some of .*copies.*, got kils"):
        crashtest(scale="quick", only=["kils", "copies"])
    with pytest.raises(ValueError, match="directory: expected a folder that is there"):
        crashtest(scale="quick", only=["copies"], directory=tmp_path / "nowhere")
