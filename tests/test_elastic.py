"""Sums in a fixed order, and what a run whose bits do not depend on its ranks refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fault_tolerant_transformer_lab.config import ConfigError, load_config, shipped_config
from fault_tolerant_transformer_lab.contract import CheckpointError, ContractError, freeze
from fault_tolerant_transformer_lab.distributed import RankRun, Ranks, part_of, run_ranks
from fault_tolerant_transformer_lab.elastic import ElasticRun, sum_in_order
from fault_tolerant_transformer_lab.model import Transformer
from fault_tolerant_transformer_lab.training import deterministic

TINY = load_config(shipped_config("smoke")).replace(
    grad_accumulation=3, batch_size=1, n_layers=1, d_model=8, n_heads=1)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_one_rank_adds_in_order(n, width, seed):
    rows = torch.randn(n, width, generator=torch.Generator().manual_seed(seed))
    expected = rows[0].tolist()
    for row in rows[1:]:  # in single precision, as torch adds two numbers
        expected = [(torch.tensor(a) + torch.tensor(b)).item() for a, b in zip(expected, row.tolist(), strict=True)]
    assert sum_in_order(rows, n, Ranks(0, 1)).tolist() == expected


@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_number_of_ranks_and_any_length_give_the_same_bits(size):
    lengths = (1, 2, 5, 64, 101)  # fewer numbers than ranks, and lengths that ranks do not divide
    rows = [torch.randn(5, n, generator=torch.Generator().manual_seed(n)) for n in lengths]

    def add(ranks):
        held = list(part_of(5, ranks.rank, ranks.size))
        return [sum_in_order(row[held], 5, ranks).tolist() for row in rows]

    alone = [sum_in_order(row, 5, Ranks(0, 1)).tolist() for row in rows]
    assert run_ranks(add, size) == [alone] * size


def test_more_ranks_than_logical_shards_are_refused():
    with pytest.raises(ConfigError, match="at least 4 logical shards for 4 ranks, got 3"):
        ElasticRun(TINY, Ranks(0, 4))


def test_a_model_with_buffers_is_refused(monkeypatch):
    plain = Transformer.from_config

    def with_buffer(config):
        model = plain(config)
        model.norm = nn.Sequential(model.norm)
        model.norm.register_buffer("running", torch.zeros(1))
        return model

    monkeypatch.setattr(Transformer, "from_config", with_buffer)
    with deterministic(threads=1), pytest.raises(ContractError, match="without buffers, got norm.running"):
        ElasticRun(TINY, Ranks(0, 1))


def test_another_mode_is_another_environment():
    def other(ranks):
        with deterministic(threads=1):
            saved = freeze(ElasticRun(TINY, ranks).contract.capture())
            try:
                RankRun(TINY.replace(grad_accumulation=3), ranks, "ddp").contract.restore(saved)
            except CheckpointError as error:
                return str(error)

    said = run_ranks(other, 1)[0]
    assert "parallel: checkpoint elastic, here ddp" in said


def test_generators_of_the_process_are_left_to_it():
    with deterministic(threads=1):
        run = ElasticRun(TINY.replace(dropout=0.1), Ranks(0, 1))
        torch.manual_seed(1)
        losses = [run.advance()]
        again = ElasticRun(TINY.replace(dropout=0.1), Ranks(0, 1))
        torch.manual_seed(2)  # whatever was drawn before changes nothing
        assert [again.advance()] == losses
