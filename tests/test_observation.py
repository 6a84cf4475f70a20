"""What a run is asked, without being changed: undeclared state, inputs, gradients, rates; and the rules over them."""

import functools
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fault_tolerant_transformer_lab.contract import Contract, NamedGenerator, Progress, RandomGenerators, walk
from fault_tolerant_transformer_lab.equivalence import ExampleRun, like_a_fresh_process, prove_restart, state_lines
from fault_tolerant_transformer_lab.observation import Auditor, StepWatch, leaf_text, reachable


def paths(**roots: object) -> set[str]:
    return {path for path, _ in reachable(roots)}


class Slotted:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = torch.zeros(1)


GLOBAL = torch.zeros(3)


def uses_a_global() -> torch.Tensor:
    return GLOBAL + 1


def with_locals():  # a generator, as a data loader is often written
    buffer = torch.zeros(2)
    while True:
        yield buffer


def test_state_is_found_wherever_python_keeps_it() -> None:
    module = nn.Linear(1, 1)
    module.hidden = [torch.zeros(1)]
    stream = with_locals()
    next(stream)
    bound = SimpleNamespace(queue=deque([torch.zeros(1)]), named={"a": (torch.zeros(1), 2)}, slotted=Slotted())
    found = paths(run=bound, module=module, function=uses_a_global, stream=stream,
                  partial=functools.partial(uses_a_global, torch.zeros(1)))
    assert {"run.queue[0]", "run.named['a'][0]", "run.named['a'][1]", "run.slotted.weight", "module.hidden[0]",
            "module.weight", "stream.buffer", "partial.args[0]"} <= found
    assert any(path.endswith(".GLOBAL") for path in found)


def test_a_walk_ends_where_objects_hold_each_other_and_enters_no_library() -> None:
    one, other = SimpleNamespace(), SimpleNamespace(number=1)
    one.other, other.one, one.random = other, one, random.Random(1)
    assert paths(run=one) == {"run.other.number", "run.random"}
    assert paths(run=SimpleNamespace(torch=torch, name="text", cls=nn.Linear, progress=deque)) == set()


@pytest.mark.parametrize("make", [torch.Generator, functools.partial(random.Random, 1),
                                  functools.partial(np.random.default_rng, 1)])
def test_a_generator_of_ones_own_is_undeclared_until_it_takes_part(make) -> None:
    run = ExampleRun()
    run.own = make()
    look = lambda contract: Auditor(run, contract).look(contract.capture(step=0).tree).generators  # noqa: E731
    before = look(run.contract)
    assert "run.own" in before
    run.own.random() if hasattr(run.own, "random") else torch.rand(1, generator=run.own)
    assert look(run.contract)["run.own"] != before["run.own"]
    assert "run.own" not in look(Contract(**run.contract.participants, own=NamedGenerator(run.own)))


def test_arrays_and_tensors_written_in_place_are_seen() -> None:
    run = ExampleRun()
    run.table, run.kept = np.zeros(3), torch.zeros(3)
    auditor = Auditor(run, run.contract)
    first = auditor.look(run.contract.capture(step=0).tree).tensors
    run.table[1] = 1.0
    run.kept.add_(1)
    second = auditor.look(run.contract.capture(step=0).tree).tensors
    assert {path for path in first if first[path] != second[path]} == {"run.table", "run.kept"}
    assert "run.inputs" in first  # constant, and known from the first look


def test_a_participant_that_hands_out_copies_has_declared_them() -> None:
    class Copies:
        def __init__(self) -> None:
            self.mean = torch.ones(3)

        def state_dict(self) -> dict:
            return {"mean": self.mean.clone()}

        def load_state_dict(self, state: dict) -> None:
            self.mean = state["mean"]

    run = SimpleNamespace(average=Copies())
    contract = Contract(average=run.average, progress=Progress())
    assert Auditor(run, contract).look(contract.capture(step=0).tree).tensors == {}


def test_reading_any_status_draws_no_number_and_changes_nothing() -> None:
    with like_a_fresh_process():
        run = ExampleRun()
        run.advance()
        generators = [leaf_text(leaf) for _, leaf in walk(RandomGenerators().state_dict())]
        lines = state_lines(run.contract)
        watch = StepWatch(run.contract)
        Auditor(run, run.contract).look(run.contract.capture(step=1).tree)
        run.contract.environment(), run.contract.identity(), run.contract.step, repr(run.contract), watch.seen()
        watch.close()
        assert state_lines(run.contract) == lines
        assert [leaf_text(leaf) for _, leaf in walk(RandomGenerators().state_dict())] == generators


def test_the_run_with_contract_store_and_witness_is_bitwise_the_bare_loop(tmp_path) -> None:
    with like_a_fresh_process():
        torch.set_num_threads(1)
        bare = ExampleRun()
        losses = [bare.advance() for _ in range(5)]
    proof = prove_restart(lambda directory: ExampleRun(), steps=5, interrupt_at=[2], in_process=True, resumes=1,
                          knock_out=False, directory=tmp_path / "runs")
    proof.raise_if_different()
    assert list(proof.rows[0].losses.values()) == losses
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "runs" / "direct-1" / "run" / "checkpoints" / "step-00000005.safetensors")
    for name, tensor in bare.model.state_dict().items():
        assert torch.equal(saved[f"model.{name}"], tensor)
    assert torch.equal(saved["optimizer.state.0.exp_avg"], bare.optimizer.state_dict()["state"][0]["exp_avg"])


def test_hooks_are_gone_after_a_proof_even_where_a_step_fails() -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks

    kept = []

    class Fails(ExampleRun):
        def advance(self) -> float:
            kept.append(self)
            raise RuntimeError("no step")

    before = len(_global_optimizer_post_hooks)
    prove_restart(lambda directory: Fails(), steps=2, in_process=True)
    assert len(_global_optimizer_post_hooks) == before and not kept[0].model._forward_pre_hooks


def test_gradients_are_those_that_the_update_used() -> None:
    run = ExampleRun()
    run.optimizer.register_step_pre_hook(lambda optimizer, *_: [
        p.grad.mul_(2) for group in optimizer.param_groups for p in group["params"]] and None)
    watch = StepWatch(run.contract)
    run.advance()
    seen = watch.seen()
    watch.close()
    assert seen["gradients"]["model.0.weight"] == leaf_text(run.model[0].weight.grad)
    assert seen["rates"] == [0.05] and len(seen["inputs"]) == 1
