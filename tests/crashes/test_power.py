"""Real power cuts on real file systems, real failing disks, a real OOM kill; what is not permitted here says so."""

import os

import pytest
import torch

from fault_tolerant_transformer_lab.crashes import (
    FILE_SYSTEMS,
    PEERS,
    REAL_FAULTS,
    RECIPE,
    CuttingDisk,
    Peer,
    WithoutDirectorySync,
    WithoutFileSync,
    fail_really,
    in_child,
    out_of_memory,
    peer_cuts,
    power_cuts,
    private_mounts,
    sync_again,
)


@pytest.mark.parametrize("saves", [3, pytest.param(10, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", FILE_SYSTEMS, ids=lambda kind: kind.name)
def test_no_power_cut_loses_an_acknowledged_checkpoint(memory_dir, kind, saves, not_run):
    [tried] = power_cuts(memory_dir, saves, [kind])
    if tried.not_run:
        not_run(f"{kind.name}: {tried.not_run}")
    assert tried.lost == 0, tried.examples
    assert tried.tried >= 8 * saves  # 320 on four file systems in the long version


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
        private_mounts()
        result = sync_again(memory_dir)
        return [list(result.syncs), result.lost]

    ended = in_child(again)
    if ended.status:
        not_run(ended.said.splitlines()[-1])
    syncs, lost = ended.value()
    assert lost and syncs[0] in ("ENOSPC", "EIO") and "" in syncs[1:]


def test_an_oom_kill_in_a_save_costs_nothing(memory_dir, not_run):
    tried = out_of_memory(memory_dir)
    if tried.not_run:
        not_run(tried.not_run)
    assert tried.lost == 0 and tried.tried == 5, tried.examples
