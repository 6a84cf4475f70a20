"""Groups of processes, what travels between them, and what a run of several ranks refuses."""

import gc
import math
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fault_tolerant_transformer_lab.config import ConfigError, load_config, shipped_config
from fault_tolerant_transformer_lab.contract import ContractError
from fault_tolerant_transformer_lab.distributed import (
    RankFailure,
    RankGenerators,
    RankRun,
    Ranks,
    gather_bytes,
    mean_in_order,
    part_of,
    process_group,
    run_ranks,
    share_step,
    tree_from_bytes,
    tree_to_bytes,
)
from fault_tolerant_transformer_lab.training import deterministic

TINY = load_config(shipped_config("smoke")).replace(
    grad_accumulation=2, batch_size=1, n_layers=1, d_model=8, n_heads=1)


@given(st.integers(0, 200), st.integers(1, 40))
def test_parts_are_the_whole_in_order_and_differ_by_one_at_most(n, size):
    parts = [list(part_of(n, rank, size)) for rank in range(size)]
    assert sum(parts, []) == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_rank_outside_the_group_has_no_part():
    with pytest.raises(ValueError, match=r"range\(2\), got 2"):
        part_of(4, 2, 2)


leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5))
trees = st.recursive(leaves, lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.text(max_size=4), st.integers()), inner, max_size=3)),
    max_leaves=8)


@settings(max_examples=60)
@given(trees, st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]),
       st.lists(st.integers(0, 3), max_size=3))
def test_a_tree_travels_as_bytes_and_comes_back_with_every_bit(tree, dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = tree_from_bytes(tree_to_bytes({"plain": tree, "tensor": tensor}))
    assert repr(back["plain"]) == repr(tree)
    assert back["tensor"].dtype == dtype and back["tensor"].equal(tensor)


def test_bytes_of_unequal_lengths_are_gathered_by_rank():
    def gather(ranks):
        return [data.decode() for data in gather_bytes(b"x" * (3 * ranks.rank))]

    assert run_ranks(gather, 3) == [["", "xxx", "xxxxxx"]] * 3


def test_the_loss_of_a_step_is_the_same_whoever_computed_which_part():
    losses = [4.1234567, 3.7654321, 5.5555555, 4.4444444, 1.1, 2.2]
    exact = [torch.tensor(loss).item() for loss in losses]

    def share(ranks):
        mine = {i: (exact[i], bytes([i] * 32)) for i in part_of(6, ranks.rank, ranks.size)}
        every, digests, flag = share_step(6, mine, flag=ranks.rank == 1)
        return [mean_in_order(every), digests.hex(), flag]

    by_size = {size: run_ranks(share, size) for size in (1, 2, 3)}
    assert len({str(result[:2]) for results in by_size.values() for result in results}) == 1
    assert by_size[2][0][1] == bytes(i for i in range(6) for _ in range(32)).hex()
    assert [by_size[size][0][2] for size in (1, 2, 3)] == [False, True, True]
    assert math.isclose(by_size[1][0][0], sum(losses) / 6, rel_tol=1e-6)


def test_the_rank_that_fails_first_is_named_with_its_cause_and_the_others_end():
    def fail(ranks):
        if ranks.rank == 1:
            raise ValueError("a planted fault")
        dist.all_reduce(torch.zeros(1))

    with pytest.raises(RankFailure, match="rank 1 of 2 was the first to fail: ValueError: a planted fault"):
        run_ranks(fail, 2)


def test_a_rank_that_does_not_end_is_killed_when_its_time_is_up():
    begun = time.monotonic()
    outcomes = run_ranks(lambda ranks: time.sleep(600), 1, timeout_s=2, check=False)
    assert time.monotonic() - begun < 60
    assert outcomes[0].exit_code == -signal.SIGKILL
    assert re.match(r"killed: its time was up; it was in <lambda> \(test_distributed.py:[0-9]+\), called by _rank_main",
                    outcomes[0].error)


def test_ranks_destroy_no_garbage_of_the_process_that_forks_them():
    class Cycle:
        def __init__(self):
            self.me = self
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # its destructor joins a thread

    gc.disable()  # the cycle is still there when the ranks are forked
    try:
        Cycle()
        assert run_ranks(lambda ranks: [gc.collect() >= 0, ranks.rank], 2, timeout_s=60) == [[True, 0], [True, 1]]
    finally:
        gc.enable()


def test_outside_of_torchrun_the_remedy_is_named(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ContractError, match="RANK, WORLD_SIZE, .* torchrun --standalone"), process_group():
        pass


def test_each_attempt_of_a_launcher_meets_in_a_part_of_the_store_of_its_own(monkeypatch):
    store = dist.HashStore()
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        with process_group(store, 0, 1, backend="gloo") as ranks:
            assert ranks.attempt == attempt
            assert ranks.store.compare_set("first", "", str(attempt)).decode() == str(attempt)


def test_micro_batches_that_the_ranks_cannot_divide_are_refused():
    with pytest.raises(ConfigError, match="grad_accumulation: expected a multiple of the 3 ranks, got 2"):
        RankRun(TINY, Ranks(0, 3), "ddp")


def test_generators_of_another_number_of_ranks_are_refused():
    generators = RankGenerators(Ranks(0, 2))
    with pytest.raises(ContractError, match="expected the generators of 2 ranks, the checkpoint has 3"):
        generators.validate_state_dict({"ranks": [{}, {}, {}]})


def test_a_loss_that_is_not_finite_stops_every_rank_before_the_update():
    def poisoned(ranks):
        with deterministic(threads=1):
            run = RankRun(TINY, ranks, "ddp")
            if ranks.rank == 1:
                run.gradients = lambda batches, plain=run.gradients: [*plain(batches)[:-1], float("nan")]
            before = run.model.token_embedding.weight.clone()
            try:
                run.advance()
            except Exception as error:
                return [type(error).__name__, bool(run.model.token_embedding.weight.equal(before)), run.progress.step]

    assert run_ranks(poisoned, 2) == [["NonFiniteLossError", True, 0]] * 2


def test_the_parent_is_left_as_it_was():
    before = (torch.get_num_threads(), dict(os.environ))
    run_ranks(lambda ranks: None, 1)
    assert (torch.get_num_threads(), dict(os.environ)) == before and not dist.is_initialized()
