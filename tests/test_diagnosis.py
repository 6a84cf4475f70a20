"""What a diagnosis says of a difference, and of a run that does not repeat itself."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fault_tolerant_transformer_lab.diagnosis import (
    Diagnosis,
    diagnosis_of,
    first_that_differs,
    locate_operation,
    of_divergence,
    with_operation,
)
from fault_tolerant_transformer_lab.equivalence import ExampleRun, Verdict, example_run, prove_restart, run_from
from fault_tolerant_transformer_lab.suspects import OUTSIDE

quick = functools.partial(prove_restart, in_process=True, resumes=1, knock_out=False, progress_bar=False)


@pytest.mark.parametrize(("fault", "suspect", "same"), [  # what both runs had alike at the step where they part
    ("generator lost", "generator torch_cpu", {"rates", "batches"}),
    ("optimizer left out", "optimizer", {"rates", "batches", "losses"}),
    ("learning rate off by one", "learning rate", {"batches", "losses"}),
    ("batch repeated", "data position", {"rates"}),
])
def test_four_bugs_that_end_alike_are_told_apart(fault: str, suspect: str, same: set) -> None:
    found = diagnosis_of(quick(functools.partial(example_run, fault=fault), steps=6, interrupt_at=[3]))
    assert found is not None and (found.step, found.tensor, found.participant) == (4, "model.0.weight", "model")
    assert found.suspects[0].name == suspect
    pairs = {"rates": found.learning_rates, "batches": found.batches, "losses": found.losses}
    assert {name for name, pair in pairs.items() if pair is not None and pair[0] == pair[1]} == same
    assert found.share and found.max_abs and found.max_ulp and "model.0.weight" in found.differing
    assert json.loads(json.dumps(found.to_plain()))["suspects"][0]["name"] == suspect


def test_a_sound_run_has_nothing_to_diagnose_and_an_unsteady_one_has() -> None:
    assert diagnosis_of(quick(example_run, steps=3, interrupt_at=[1])) is None
    found = diagnosis_of(quick(functools.partial(example_run, fault="not deterministic"), steps=4, interrupt_at=[1]))
    assert found is not None and found.step == 3


def test_only_last_bits_are_laid_on_the_machine() -> None:
    divergence = next(row.divergence for row in quick(functools.partial(example_run, fault="counter left out"), steps=4,
                                                      interrupt_at=[2]).rows if row.divergence)
    assert of_divergence(divergence).suspects[0].name == OUTSIDE  # far apart: something was lost
    near = replace(divergence, max_ulp=2)
    assert [suspect.name for suspect in of_divergence(near).suspects[:2]] == ["environment", OUTSIDE]
    assert of_divergence(replace(near, suspect="optimizer")).suspects[0].name != "environment"


def test_losses_that_look_alike_are_written_with_the_digits_that_tell_them_apart() -> None:
    text = str(Diagnosis(1, "w", losses=(0.1, 0.1 + 1e-12), learning_rates=((0.1, 0.1), (0.1, 0.2))))
    assert "loss: 0.10000000000000001, recovered 0.10000000000100001" in text
    assert "learning rate: 0.1, recovered 0.1, 0.2" in text


def test_bisection_asks_seldom() -> None:
    asked: list[int] = []

    def differs(step: int) -> bool:
        asked.append(step)
        return step >= 37

    assert first_that_differs(range(1, 65), differs) == 37 and len(asked) <= 7
    assert first_that_differs([], differs) is None and first_that_differs([1, 2], lambda step: True) == 1


class Unsteady(ExampleRun):
    "Multiplies its gradients by a number that torch was not asked to repeat, in the backward pass."

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator()
        self.source.seed()
        self.model[3].weight.register_hook(lambda gradient: gradient * torch.rand((), generator=self.source))


def test_the_operation_that_gives_other_numbers_is_named_in_the_backward_pass_too() -> None:
    located = locate_operation(lambda directory: Unsteady(), step=1)
    assert located is not None and located.operation.startswith("aten.rand")
    assert located.step == 1 and "called at test_diagnosis.py:" in str(located)
    assert locate_operation(example_run, step=2) is None


class NumpyNoise(ExampleRun):
    "Adds noise that NumPy makes and nobody seeded."

    def _noisy(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.from_numpy(np.random.default_rng().normal(size=inputs.shape).astype(np.float32))


class UnseededStart(ExampleRun):
    "Begins with other weights each time."

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator()
        generator.seed()
        torch.nn.init.normal_(self.head.weight, generator=generator)


def numpy_noise(directory: Path) -> NumpyNoise:
    return NumpyNoise()


def unseeded_start(directory: Path) -> UnseededStart:
    return UnseededStart()


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize(("make_run", "words"), [
    (functools.partial(example_run, fault="not deterministic"), ["step 3, operation ", "bernoulli", " in model.2,"]),
    (numpy_noise, ["step 1, operation ", "called at test_diagnosis.py:", "from outside of torch"]),
    (unseeded_start, ["while the run was made", "aten.normal_", "called at "])], ids=["dropout", "numpy", "start"])
def test_an_abstaining_proof_names_the_operation_in_the_process_it_was_run_in(make_run, words, in_process) -> None:
    proof = prove_restart(make_run, steps=4, interrupt_at=[2], in_process=in_process, resumes=1, knock_out=False,
                          progress_bar=False)
    told = with_operation(proof, make_run)
    assert proof.verdict is Verdict.NONDETERMINISTIC and "operation" not in proof.facts
    for said in (str(told), str(diagnosis_of(told)), told.to_json()):
        assert all(word in said for word in words), said


def test_what_cannot_be_recorded_is_said_and_changes_no_verdict() -> None:
    class FailsWhenRecorded(ExampleRun):
        def advance(self) -> float:
            from torch.utils._python_dispatch import _get_current_dispatch_mode

            if _get_current_dispatch_mode() is not None:
                raise RuntimeError("no modes here")
            self.fault = "not deterministic"
            return super().advance()

    make_run = lambda directory: FailsWhenRecorded()  # noqa: E731
    proof = quick(make_run, steps=4, interrupt_at=[2])
    told = with_operation(proof, make_run)
    assert told.verdict is proof.verdict is Verdict.NONDETERMINISTIC
    assert "the run failed while its operations were recorded (RuntimeError: no modes here)" in str(told)


def test_what_differs_now_and_then_is_not_given_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    unsteady = functools.partial(example_run, fault="not deterministic")
    proof = quick(unsteady, steps=4, interrupt_at=[2])
    told = with_operation(proof, example_run)  # that repeats itself, as the other one may by chance
    assert "not found: recorded twice more" in told.facts["operation"]
    sound = quick(example_run, steps=3, interrupt_at=[1])
    assert with_operation(sound, example_run) is sound


def linear_run(directory: Path, make_optimizer=torch.optim.SGD, forget: bool = False):
    "A run of ten lines, made of a function; forget: the optimizer is no participant."
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    optimizer = make_optimizer(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return run_from(step, model=model) if forget else run_from(step, model=model, optimizer=optimizer)


def test_a_run_made_of_a_function_is_proven_and_diagnosed() -> None:
    quick(linear_run, steps=4).raise_if_different()
    found = diagnosis_of(quick(functools.partial(linear_run, forget=True), steps=4, interrupt_at=[2]))
    assert found is not None and found.suspects[0].name == "optimizer" and found.step == 3
    assert found.batches is not None and found.batches[0] == found.batches[1]


class OtherRows(ExampleRun):
    "Takes other rows once it was resumed, as a loader does whose order nobody kept."

    def advance(self) -> float:
        if self.resumed_at < 0 and self.progress.step:
            take = self.passes.take
            self.passes.take = lambda n: (take(n) + torch.tensor([0, 5, 9, 13])) % 24
        return super().advance()


class HiddenMomentum(torch.optim.SGD):
    "Weighs each gradient by a number that is in no `state_dict`."

    weight = 1.0

    @torch.no_grad()
    def step(self, closure=None) -> None:
        self.weight *= 0.5
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad, alpha=self.weight)
                parameter.sub_(momentum, alpha=group["lr"])


def without_a_forward_call(directory: Path):
    "Its model is never called, and what it is given depends on a counter of its own."
    torch.manual_seed(1)
    model, count = torch.nn.Linear(3, 1), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        loss = (torch.full((2, 3), float(count)) @ model.weight.T + model.bias).square().mean() / 100
        loss.backward()
        optimizer.step()
        return loss

    return run_from(step, model=model, optimizer=optimizer)


@pytest.mark.parametrize(("make_run", "name", "reason"), [
    (lambda directory: OtherRows(), "data position", "one of no step of the uninterrupted run"),
    (without_a_forward_call, f"data position or {OUTSIDE}", "give record() a batch_digest to tell"),
    (functools.partial(linear_run, make_optimizer=HiddenMomentum), "optimizer",
     "what it updates from is not all in it; the first key that differs is optimizer.state[0].momentum"),
], ids=["other rows", "no forward call", "hidden momentum"])
def test_what_seldom_goes_wrong_has_its_suspect_too(make_run, name: str, reason: str) -> None:
    found = diagnosis_of(quick(make_run, steps=4, interrupt_at=[2]))
    assert found is not None and found.step == 3
    assert found.suspects[0].name == name and reason in found.suspects[0].reason
