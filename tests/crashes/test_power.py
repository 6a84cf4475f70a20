"""Real power cuts on real file systems, real failing disks, a real OOM kill; what is not permitted here says so."""

import errno
import os

import pytest
import torch

from fault_tolerant_transformer_lab.crashes import (
    FILE_SYSTEMS,
    LARGE_BLOCKS,
    LARGE_FILE_SYSTEMS,
    PEERS,
    REAL_FAULTS,
    RECIPE,
    CuttingDisk,
    FileSystemKind,
    Peer,
    WithoutDirectorySync,
    WithoutFileSync,
    fail_really,
    kills_counted,
    out_of_memory,
    peer_cuts,
    power_cuts,
    sync_again,
    with_private_mounts,
)
from fault_tolerant_transformer_lab.publication import Generations


@pytest.mark.parametrize("neighbour", [False, True], ids=["alone", "a neighbour's fsync before"])
@pytest.mark.parametrize("saves", [4, pytest.param(10, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", FILE_SYSTEMS, ids=lambda kind: kind.name)
def test_no_power_cut_loses_an_acknowledged_checkpoint(memory_dir, kind, saves, neighbour, not_run):
    [tried] = power_cuts(memory_dir, saves, [kind], neighbour=neighbour)
    if tried.not_run:
        not_run(f"{kind.name}: {tried.not_run}")
    assert tried.lost == 0, tried.examples
    assert tried.tried >= 9 * saves + 2  # 304 and more on four file systems, alone and with a neighbour


@pytest.mark.parametrize("kind", LARGE_FILE_SYSTEMS, ids=lambda kind: kind.name)
def test_no_power_cut_loses_a_file_written_past_the_page_cache(memory_dir, kind, not_run):
    [tried] = power_cuts(memory_dir, 1, [kind], neighbour=True, n_blocks=LARGE_BLOCKS)
    if tried.not_run:
        not_run(f"{kind.name}: {tried.not_run}")
    assert tried.lost == 0, tried.examples
    assert tried.tried >= 12 and "files of more than 8 MiB" in tried.fault and tried.detail["direct"]


@pytest.mark.parametrize("disk_type", ["CutWithoutFileSync", "CutWithoutDirectorySync"])
def test_a_real_file_system_convicts_a_store_that_does_not_sync_a_large_file(memory_dir, disk_type, not_run):
    [tried] = power_cuts(memory_dir, 1, LARGE_FILE_SYSTEMS[:1], globals()[disk_type], n_blocks=LARGE_BLOCKS)
    if tried.not_run:
        not_run(tried.not_run)
    assert any("acknowledged step 1 is lost" in example for example in tried.examples), tried.examples


def test_power_is_cut_in_saves_of_each_mode(memory_dir, not_run):
    [tried] = power_cuts(memory_dir, 3, FILE_SYSTEMS[:1])
    if tried.not_run:
        not_run(tried.not_run)
    assert tried.detail["saves"] == {"sync": 1, "async": 1, "overlapped": 1} and tried.lost == 0, tried.examples


class CutWithoutFileSync(WithoutFileSync, CuttingDisk):
    "The real store without the sync of its file."


class CutWithoutDirectorySync(WithoutDirectorySync, CuttingDisk):
    "The real store without the sync of its directory."


@pytest.mark.parametrize("disk_type", [CutWithoutFileSync, CutWithoutDirectorySync])
@pytest.mark.parametrize("kind", FILE_SYSTEMS, ids=lambda kind: kind.name)
def test_a_real_file_system_convicts_a_store_that_does_not_sync(memory_dir, kind, disk_type, not_run):
    [tried] = power_cuts(memory_dir, 1, [kind], disk_type)
    if tried.not_run:
        not_run(f"{kind.name}: {tried.not_run}")
    assert any("acknowledged step 1 is lost" in example for example in tried.examples), tried.examples


def test_power_cuts_cost_the_peers_what_they_acknowledged_and_us_nothing(memory_dir, not_run):
    table = peer_cuts(memory_dir, 1)
    if isinstance(table, str):
        not_run(table)
    lost = {name: sum(found.get("new", 0) == 0 for found in cuts.values()) for name, cuts in table.items()}
    losers = ("torch.save", RECIPE, "safetensors save_file", "torch.distributed.checkpoint")
    assert {peer.name for peer in PEERS} == {*losers, "CheckpointStore"}
    assert lost == dict.fromkeys(losers, len(FILE_SYSTEMS)) | {"CheckpointStore": 0}


def test_after_a_neighbours_fsync_the_common_recipe_loses_both_states(memory_dir, not_run):
    table = peer_cuts(memory_dir, 1, neighbour=True)
    if isinstance(table, str):
        not_run(table)
    found = {peer: [next(iter(cuts[kind.name])) for kind in FILE_SYSTEMS] for peer, cuts in table.items()}
    assert found["CheckpointStore"] == ["new"] * 4
    assert "nothing" in found[RECIPE], found  # here: new, nothing, nothing, old
    assert all("nothing" in found[peer] for peer in ("torch.save", "safetensors save_file")), found


def test_the_harness_finds_what_is_synced_and_what_is_lost(memory_dir, not_run):
    def save(state, path):
        with open(path, "wb") as file:
            file.write(b"%d" % state["weight"][0, 0])
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def load(path):
        return {"weight": torch.full((64, 1024), float(path.read_bytes()))}

    for sync, expected in ((True, "new"), (False, "old")):
        table = peer_cuts(memory_dir / str(sync), 1, FILE_SYSTEMS[:1], [Peer("mine", save, load)])
        if isinstance(table, str):
            not_run(table)
        [[found]] = [list(cuts.values()) for cuts in table.values()]
        assert found == {expected: 1} or (not sync and "nothing" in found)


def test_real_faults_of_the_kernel_are_told_and_cost_nothing(memory_dir, not_run):
    tried = fail_really(memory_dir)
    if tried.not_run:
        not_run(tried.not_run)
    assert tried.lost == 0 and tried.tried == len(REAL_FAULTS) == 9, tried.examples


def test_a_second_fsync_succeeds_over_lost_bytes(memory_dir, not_run):
    "Why a failed fsync is never tried again."
    def again():
        result = sync_again(memory_dir)
        return [list(result.syncs), result.lost]

    found, reason = with_private_mounts(again)
    if reason:
        not_run(reason)
    syncs, lost = found
    assert lost and syncs[0] in ("ENOSPC", "EIO") and "" in syncs[1:]


def test_a_reader_that_fails_is_lost_and_not_filed_as_not_run(memory_dir, not_run, monkeypatch):
    def fails(reader):
        raise OSError(errno.EIO, "the reader fails")

    monkeypatch.setattr(Generations, "latest", fails)
    [tried] = power_cuts(memory_dir, 1, FILE_SYSTEMS[:1])
    if tried.not_run:
        not_run(tried.not_run)
    assert tried.lost == tried.tried >= 10 and "the reader fails" in tried.examples[0]


def test_a_peer_that_cannot_save_or_load_at_all_is_an_error_and_no_loss(memory_dir, not_run):
    def broken(*anything):
        raise TypeError("a mistake of ours")

    _, reason = with_private_mounts(lambda: None)
    if reason:
        not_run(reason)
    works = PEERS[0]
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        peer_cuts(memory_dir / "save", 1, FILE_SYSTEMS[:1], [Peer("mine", broken, works.load)])
    with pytest.raises(RuntimeError, match="mine loads nothing of what it has just saved"):
        peer_cuts(memory_dir / "load", 1, FILE_SYSTEMS[:1], [Peer("mine", works.save, broken)])


def test_what_the_machine_does_not_permit_is_not_run_with_its_reason(memory_dir, not_run):
    _, reason = with_private_mounts(lambda: None)
    if reason:
        not_run(reason)
    unknown = FileSystemKind("unknown", ("mkfs.of-no-file-system",), 16, "")
    [tried] = power_cuts(memory_dir / "cuts", 1, [unknown])
    assert (tried.tried, tried.lost) == (0, 0) and tried.not_run == "mkfs.of-no-file-system is not installed"
    assert peer_cuts(memory_dir / "peers", 1, [unknown]) == "unknown: mkfs.of-no-file-system is not installed"


def test_a_kill_that_the_kernel_does_not_count_is_no_oom_kill():
    assert kills_counted("low 0\noom_kill 2\n") == 2
    assert kills_counted("oom_kill 0\n") == kills_counted("oom_kill_disable 0\nunder_oom 0\n") == kills_counted("") == 0


def test_an_oom_kill_in_a_save_costs_nothing(memory_dir, not_run):
    tried = out_of_memory(memory_dir)
    if tried.not_run:
        not_run(tried.not_run)
    assert tried.lost == 0 and tried.tried == 5, tried.examples
