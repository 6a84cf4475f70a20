"""Every kind of state of a larger system: resumed to the bit, missed when it is lost, wherever the run stops."""

import copy
import json
import os
import random
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fault_tolerant_transformer_lab import larger_state
from fault_tolerant_transformer_lab.checkpoint_file import open_checkpoint
from fault_tolerant_transformer_lab.contract import (
    CheckpointMismatchError,
    NamedGenerator,
    PlainState,
    RandomGenerators,
    generators_undisturbed,
)
from fault_tolerant_transformer_lab.equivalence import Verdict, prove_restart
from fault_tolerant_transformer_lab.larger_state import (
    KINDS,
    PLAIN_LOADERS,
    SCHEDULES,
    STATEFUL_LOADERS,
    STEP_LOADERS,
    Difference,
    Kind,
    System,
    Watcher,
    examples,
    first_difference,
    follow,
    measurable,
    measure,
    resume,
    start,
)
from fault_tolerant_transformer_lab.publication import CheckpointStore
from fault_tolerant_transformer_lab.training import deterministic

HERE = [kind for kind in KINDS.values() if measurable(kind)]
IN_THIS_PROCESS = [kind for kind in HERE if kind not in (*STEP_LOADERS, *PLAIN_LOADERS, *STATEFUL_LOADERS)]
pytestmark = pytest.mark.filterwarnings("ignore")  # some of torch's schedules warn of themselves


@pytest.fixture(autouse=True)
def undisturbed():
    "Each test leaves threads and generators as it found them."
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with generators_undisturbed():
        yield
    torch.set_num_threads(threads)


def by_name(kind: Kind) -> str:
    return kind.name


# The table


@pytest.mark.parametrize("kind", KINDS.values(), ids=by_name)
def test_a_kind_of_state_resumes_to_the_bit_and_is_missed_when_it_is_lost(kind):
    if not measurable(kind):
        pytest.skip(f"needs {'a CUDA device' if kind.needs == 'cuda' else kind.needs}")
    row = measure(kind)
    assert (row.proven, row.caught) == (kind.resumes, not kind.resumes)
    if kind.resumes:
        assert row.resumed is None
    else:
        assert row.resumed is not None and row.resumed.step > kind.stop
        assert KINDS[kind.instead].resumes


def nothing(system):
    "Loses nothing."


@pytest.mark.parametrize("kind", [k for k in HERE if k not in STEP_LOADERS or "1 then 2" in k.name], ids=by_name)
def test_no_row_can_be_proven_by_losing_nothing(kind):
    if kind.resumes:
        row = measure(replace(kind, lose=nothing, lost="nothing", inside=("nothing",), without=None))
        assert row.resumed is None and row.knocked_out is None and not row.proven and not row.caught
    else:
        with pytest.raises(ValueError, match="expected nothing to lose where nothing resumes, got lost='nothing'"):
            replace(kind, lose=nothing, lost="nothing")
        row = measure(kind)
        assert row.knocked_out is None and not row.proven
        assert not measure(replace(kind, resumes=True, instead="")).proven  # nor by calling it resumable


@pytest.mark.parametrize("name", ["accumulated gradients", "worker seeds drawn before the restore",
                                  "StatefulDataLoader, sampler's own generator"])
def test_a_kind_that_resumes_is_not_caught(name):
    if measurable(KINDS[name]):
        row = measure(replace(KINDS[name], resumes=False, lost=""))
        assert row.resumed is None and not row.caught and not row.proven


def test_the_notebook_shows_every_kind_in_the_order_of_the_table():
    notebook = json.loads((Path(__file__).parents[1] / "nbs" / "03a_larger_state.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    shown = re.findall(r"^\s*show\((.*)\)$", "\n".join(cells), re.MULTILINE)
    assert all(re.fullmatch(r"\*[A-Z_]+", argument) for argument in shown), shown  # no row of the page alone
    tuples = [getattr(larger_state, argument[1:]) for argument in shown]
    assert [kind.name for kinds in tuples for kind in kinds] == list(KINDS)


def test_what_a_machine_lacks_is_not_measured(monkeypatch):
    cuda = KINDS["CUDA's generator"]
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert measurable(cuda) is there
    assert not measurable(Kind("", lambda at: None, needs="no_such_package_here"))
    assert all(measurable(kind) for kind in KINDS.values() if not kind.needs)
    assert [kind.name for kind in KINDS.values() if kind.needs == "torchdata"] == [k.name for k in STATEFUL_LOADERS]


def test_the_kinds_are_those_that_were_promised():
    promised = ["LambdaLR", "OneCycleLR", "ReduceLROnPlateau", "CosineAnnealingWarmRestarts", "SequentialLR",
                "GradScaler", "bfloat16 autocast", "EMA", "SWA", "BatchNorm", "non-persistent buffer", "SGD, momentum",
                "Adagrad", "Adafactor", "LBFGS", "several optimizers", "group added later", "foreach", "fused",
                "amsgrad", "before the first step", "frozen layer that thaws", "accumulated gradients", "Python's",
                "NumPy's global", "numpy.random.Generator", "torch's global", "torch.Generator", "in each layer",
                "0 then 1 workers", "1 then 2 workers", "2 then 4 workers", "4 then 0 workers", "StatefulDataLoader",
                "plain shuffled DataLoader", "PlainState", "CUDA's generator"]  # fmt: skip
    assert [name for name in promised if not any(name in kind for kind in KINDS)] == []
    assert ("Muon, with AdamW" in KINDS) is hasattr(torch.optim, "Muon")
    assert {kind.name for kind in KINDS.values() if not kind.resumes} == {
        "accumulated gradients, not declared", "worker seeds drawn from torch's generator",
        "noise from the workers' own generators",
        "plain shuffled DataLoader, mid-epoch", "StatefulDataLoader, one generator",
        "StatefulDataLoader, iterated before restore",
    }  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in IN_THIS_PROCESS if kind.resumes], ids=by_name)
def test_a_run_resumes_to_the_bit_wherever_it_stopped(kind):
    whole = follow(start(replace(kind, stop=0))[0], kind.steps)
    for stop in range(kind.steps):
        stopped = replace(kind, stop=stop)
        assert first_difference(whole[stop:], resume(stopped, start(stopped)[1])) is None, f"stopped after {stop}"


@pytest.mark.parametrize("kind", [k for k in IN_THIS_PROCESS if k.resumes and "later" not in k.name], ids=by_name)
def test_a_used_run_goes_back_to_its_checkpoint_in_its_own_process(kind):
    run, saved = start(kind)
    expected = follow(run, kind.steps - kind.stop)
    run.contract.restore(saved)
    assert first_difference(expected, follow(run, kind.steps - kind.stop)) is None


class NoisyRows(torch.utils.data.Dataset):
    "The rows of an epoch with noise that torch's generator draws in whichever process prepares them."

    def __len__(self):
        return 8

    def __getitem__(self, row):
        inputs, targets, number = larger_state._EPOCH[row]
        return inputs + torch.randn(6), targets, number


@pytest.mark.parametrize(("workers", "own_sampler", "where"), [
    (0, True, None), (2, False, Difference(7, "model.0.weight")), (2, True, Difference(7, "model.0.weight"))])
def test_what_is_drawn_in_a_worker_is_not_resumed_and_caught(workers, own_sampler, where):
    pytest.importorskip("torchdata.stateful_dataloader")
    build = larger_state._stateful(workers, own_sampler, data=NoisyRows())
    row = measure(Kind("drawn in a worker", build, stop=6, steps=10, resumes=False))
    assert row.repeated is None and row.resumed == where and row.caught is (where is not None)


def test_the_worker_seeds_of_the_next_epoch_are_lost_with_a_sampler_that_has_a_generator_of_its_own():
    pytest.importorskip("torchdata.stateful_dataloader")
    row = measure(Kind("", larger_state._stateful(2, True), stop=6, steps=10, resumes=False))
    assert row.caught and row.resumed == Difference(9, "loader._snapshot._main_snapshot._base_seed")


@pytest.mark.parametrize("kind", [kind for kind in STATEFUL_LOADERS if kind.resumes], ids=by_name)
def test_a_loader_with_a_position_resumes_wherever_it_stopped(kind):
    pytest.importorskip("torchdata.stateful_dataloader")
    whole = follow(start(replace(kind, stop=0))[0], kind.steps)
    for stop in (0, 1, 3, 4, 5, 8, 9):  # 4 and 8 are the ends of epochs
        stopped = replace(kind, stop=stop)
        assert first_difference(whole[stop:], resume(stopped, start(stopped)[1])) is None, f"stopped after {stop}"


SAVE_ALL = """
import sys, torch, warnings
from pathlib import Path
from fault_tolerant_transformer_lab.larger_state import KINDS, start
from fault_tolerant_transformer_lab.publication import CheckpointStore
warnings.simplefilter("ignore")
torch.set_num_threads(1)
for number, name in enumerate(KINDS):
    if name in sys.argv[2:]:
        run, _ = start(KINDS[name])
        with CheckpointStore(Path(sys.argv[1]) / str(number)) as store:
            store.save(run.contract, step=KINDS[name].stop)
"""


@pytest.fixture(scope="module")
def saved_elsewhere(tmp_path_factory):
    "Checkpoints of all kinds, each trained to its stop and published by another process."
    folder = tmp_path_factory.mktemp("elsewhere")
    names = [kind.name for kind in HERE]
    subprocess.run([sys.executable, "-c", SAVE_ALL, str(folder), *names], check=True, env=os.environ)
    return folder


@pytest.mark.parametrize("kind", HERE, ids=by_name)
def test_what_another_process_has_saved_resumes_here_to_the_bit(kind, saved_elsewhere):
    [path] = (saved_elsewhere / str(list(KINDS).index(kind.name))).glob("**/*.safetensors")
    run, _ = start(kind)
    expected = follow(run, kind.steps - kind.stop)
    with open_checkpoint(path) as saved:
        difference = first_difference(expected, resume(kind, saved))
    assert (difference is None) is kind.resumes


# Systems that are built otherwise


def averaged_by_hand(at):
    "A copy of the model, averages and statistics kept by hand."
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(number):
        loss = descend(model, optimizer, number)
        with torch.no_grad():
            for mean, new in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                mean.lerp_(new, 0.1) if mean.is_floating_point() else mean.copy_(new)
        return loss

    return System(step, model=model, average=average, optimizer=optimizer)


def descend(model, optimizer, number, scaler=None):
    inputs, targets = examples(number)
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
    return loss.item()


def scaled(used, options, at):
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", **options)
    return System(lambda number: descend(model, optimizer, number, scaler if used else None),
                  model=model, optimizer=optimizer, scaler=scaler)


class CountsItsCalls:
    "A schedule's function with state of its own."

    def __init__(self):
        self.calls, self.seen = 0, []

    def __call__(self, epoch):
        self.calls += 1
        self.seen.append(epoch)
        return 1 / (1 + self.calls)


def scheduled(make, at):
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)

    def step(number):
        loss = descend(model, optimizer, number)
        scheduler.step()
        return loss

    return System(step, model=model, optimizer=optimizer, scheduler=scheduler)


def growing_under_a_schedule(at):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.02)
    scheduler = S.LambdaLR(optimizer, lambda done: 0.9**done)

    def grow():
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.005, "initial_lr": 0.005})
        scheduler.lr_lambdas.append(scheduler.lr_lambdas[0])
        scheduler.base_lrs.append(0.005)

    def step(number):
        if number == 3:
            grow()
        loss = descend(model, optimizer, number)
        scheduler.step()
        return loss

    if at > 3:
        grow()
    return System(step, model=model, optimizer=optimizer, scheduler=scheduler)


S = torch.optim.lr_scheduler
OTHERS = {
    "an average kept by hand": averaged_by_hand,
    "a scaler that never overflowed": partial(scaled, True, {"init_scale": 2.0, "growth_interval": 4}),
    "a scaler that was never used": partial(scaled, False, {}),
    "a scaler that is switched off": partial(scaled, True, {"enabled": False}),
    "a schedule's function with state": partial(scheduled, lambda o: S.LambdaLR(o, CountsItsCalls())),
    "three schedules with two milestones": partial(scheduled, lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.2, total_iters=3), S.CosineAnnealingWarmRestarts(o, 2), S.ExponentialLR(o, 0.9)], [3, 6])),
    "a schedule inside of a schedule": partial(scheduled, lambda o: S.SequentialLR(
        o, [S.ChainedScheduler([S.LinearLR(o), S.ExponentialLR(o, 0.9)]), S.CosineAnnealingLR(o, 4)], [4])),
    "a group added under a schedule": growing_under_a_schedule,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_system_that_is_built_otherwise_resumes_wherever_it_stopped(name, tmp_path):
    kind = Kind(name, OTHERS[name], lost="", steps=9)
    whole = follow(start(replace(kind, stop=0))[0], kind.steps)
    for stop in range(kind.steps):
        run, saved = start(replace(kind, stop=stop))
        assert first_difference(whole[stop:], resume(replace(kind, stop=stop), saved)) is None, f"stopped after {stop}"
        if stop == 5:
            with CheckpointStore(tmp_path) as store:
                path = store.save(run.contract).path
    with open_checkpoint(path) as saved:
        assert first_difference(whole[5:], resume(replace(kind, stop=5), saved)) is None


def on_cuda(what, at):
    "A run on the GPU that exercises one thing."
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3 if what == "generator" else 0.0), nn.Linear(8, 1)).cuda()
    options = {"capturable": {"capturable": True}, "fused": {"fused": True}}.get(what, {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, **options)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**19, growth_interval=2) if what == "scaler" else None
    own = torch.Generator("cuda").manual_seed(int(torch.randint(2**31, ())))  # another one in each process

    def step(number):
        inputs, targets = (each.cuda() for each in examples(number))
        if what == "own generator":
            inputs = inputs + torch.randn(inputs.shape, generator=own, device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
            outputs = model(inputs)
        loss = (outputs.float() - targets).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        return loss.item()

    more = {"rng": RandomGenerators()} if scaler is None else {"scaler": scaler}
    more |= {"noise": NamedGenerator(own)} if what == "own generator" else {}
    return System(step, model=model, optimizer=optimizer, **more)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("what", ["generator", "own generator", "scaler", "capturable", "fused"])
def test_a_run_on_cuda_resumes_to_the_bit_and_its_state_is_missed(what):
    lose = {"generator": lambda system: torch.cuda.manual_seed_all(99)}.get(what)
    lost = {"scaler": "scaler", "own generator": "noise"}.get(what, "optimizer")
    kind = Kind(what, partial(on_cuda, what), lost=lost, lose=lose, inside=("rng",) if lose else ())
    with deterministic():
        assert measure(kind).proven


# The harness can fail


def small_run(momentum=0.9, after=lambda step: None):
    def build(at: int) -> System:
        model = nn.Linear(6, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

        def step(number: int) -> float:
            inputs, targets = examples(number)
            sgd.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            sgd.step()
            after(number)
            return loss.item()

        return System(step, model=model, optimizer=sgd)

    return build


def test_a_loss_that_changes_nothing_is_no_proof():
    row = measure(Kind("no momentum", small_run(momentum=0), lost="optimizer"))
    assert (row.resumed, row.knocked_out, row.proven) == (None, None, False)


def with_onlooker(reads):
    "A run with a counter that is state, and that the run may or may not read."

    def build(at):
        onlooker = SimpleNamespace(calls=1)
        system = small_run(momentum=0)(at)
        sgd, model = system.part("optimizer"), system.part("model")

        def step(number):
            onlooker.calls += 1
            sgd.param_groups[0]["lr"] = 0.1 / (onlooker.calls if reads else 1)
            return descend(model, sgd, number)

        return System(step, model=model, optimizer=sgd, onlooker=PlainState(onlooker))

    return build


@pytest.mark.parametrize("reads", [False, True])
def test_a_participant_that_matters_to_nothing_is_no_proof(reads):
    kind = Kind("onlooker", with_onlooker(reads), lost="onlooker")
    row = measure(kind)
    assert row.resumed is None and row.proven is reads
    by_part = replace(kind, lost="calls", inside=("onlooker.calls",),
                      lose=lambda system: setattr(system.part("onlooker").obj, "calls", 1))
    assert measure(by_part).proven is reads
    with pytest.raises(ValueError, match="expected inside= beside lose="):
        replace(by_part, inside=())


def test_a_run_that_is_not_deterministic_is_no_proof():
    weights = []

    def disturb(step):
        weights.append(step)

    def build(at):
        system = small_run(after=disturb)(at)
        original = system.advance

        def advance():
            with torch.no_grad():
                system.part("model").bias.add_(len(weights) * 1e-3)
            return original()

        system.advance = advance
        return system

    row = measure(Kind("remembers other runs", build, lost="optimizer"))
    assert row.resumed == Difference(6, "model.weight") and not row.proven


@pytest.mark.parametrize("lost", ["rng", "nothing"])
def test_a_run_that_is_another_one_each_time_is_not_caught(lost):
    "A difference says something of a resume where a run without a stop is the same twice."
    def build(at):
        system, source = small_run()(at), random.SystemRandom()
        bias, original = system.part("model").bias, system.advance

        def advance():
            with torch.no_grad():
                bias.add_(torch.rand(()) if lost == "rng" else source.random())
            return original()

        system.advance = advance
        return system

    row = measure(Kind("draws", build, resumes=False))
    assert row.resumed is not None and not row.proven
    assert row.caught is (lost == "rng") is (row.repeated is None)


@pytest.mark.parametrize("change", ["minus zero", "one bit", "type", "missing", "more"])
def test_two_runs_are_compared_by_bits(change):
    with generators_undisturbed():
        expected = follow(start(Kind("", small_run(), "", stop=0))[0], 2)
    leaves = dict(expected[1].leaves)
    bias = leaves["model.bias"].data
    if change == "minus zero":
        expected[1].leaves["model.bias"], leaves["model.bias"] = (
            type(leaves["model.bias"])(torch.full_like(bias, zero)) for zero in (0.0, -0.0))
    elif change == "one bit":
        leaves["model.bias"] = type(leaves["model.bias"])((bias.view(torch.int32) ^ 1).view(torch.float32))
    elif change == "type":
        leaves["optimizer.param_groups[0].momentum"] = torch.tensor(0.9)
    elif change == "missing":
        del leaves["model.bias"]
    else:
        leaves["optimizer.extra"] = None
    found = [expected[0], replace(expected[1], leaves=leaves)]
    difference = first_difference(expected, found)
    path = {"type": "optimizer.param_groups[0].momentum", "more": "optimizer.extra"}.get(change, "model.bias")
    assert difference == Difference(2, path)
    assert first_difference(expected, found, outside=(path.split(".")[0],)) is None
    assert first_difference(expected, found, outside=(path,)) is None
    assert first_difference(expected, found, outside=(path[:-1], path.split(".")[0][:-1])) == difference


@pytest.mark.parametrize("kind", SCHEDULES, ids=by_name)
@pytest.mark.parametrize("by", [-1, 1])
def test_a_schedule_that_is_one_step_off_is_found_in_the_rates(kind, by):
    def shift(system):
        scheduler = system.part("scheduler")
        scheduler.last_epoch += by
        if hasattr(scheduler, "T_cur"):
            scheduler.T_cur += by
        for inner in getattr(scheduler, "_schedulers", ()):
            inner.last_epoch += by

    if kind.name == "ReduceLROnPlateau":  # it keeps no position, but a count of bad steps
        def shift(system):
            system.part("scheduler").num_bad_epochs += by

    off = replace(kind, lost="the position", lose=shift, inside=("scheduler",))
    row = measure(off)
    assert row.resumed is None and row.knocked_out is not None
    run, saved = start(kind)
    rates = [moment.rates for moment in follow(run, kind.steps - kind.stop)]
    assert [moment.rates for moment in resume(kind, saved)] == rates
    assert [moment.rates for moment in resume(off, saved, True)] != rates


def test_a_watcher_asks_after_two_losses_in_a_row_and_counts_anew():
    watcher = Watcher()
    losses = [5, 6, 4, 6, 6, 6, 6, 3, 7, 7, 7]
    asked = [step for step, loss in enumerate(losses) if watcher.see(loss, step)]
    assert asked == [4, 6, 9] and (watcher.best, watcher.best_step) == (3, 7)


# What is refused


def test_a_run_that_has_not_added_its_group_yet_is_refused_and_untouched():
    kind = KINDS["a parameter group added later"]
    saved = start(kind)[1]
    early = kind.build(0)
    before = {name: value.clone() for name, value in early.part("model").state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match="param_groups: checkpoint 2 groups, here 1 groups; build the"):
        early.contract.restore(saved)
    assert all(torch.equal(value, before[name]) for name, value in early.part("model").state_dict().items())
    late = kind.build(kind.stop)
    early_saved = start(replace(kind, stop=2))[1]
    with pytest.raises(CheckpointMismatchError, match="param_groups: checkpoint 1 groups, here 2 groups"):
        late.contract.restore(early_saved)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1)])
def test_a_stateful_loader_with_another_number_of_workers_is_refused_and_untouched(before, after):
    pytest.importorskip("torchdata.stateful_dataloader")
    saved = start(Kind("", larger_state._stateful(before, True), stop=2))[1]
    other = larger_state._stateful(after, True)(2)
    weights = {name: value.clone() for name, value in other.part("model").state_dict().items()}
    message = f"loader.num_workers: checkpoint {before}, here {after}"
    with pytest.raises(CheckpointMismatchError, match=message):
        other.contract.restore(saved)
    assert all(torch.equal(value, weights[name]) for name, value in other.part("model").state_dict().items())
    other.advance()


def test_ways_of_computing_the_same_moments_are_not_exchanged():
    fused = start(KINDS["AdamW, fused"])[1]
    with pytest.raises(CheckpointMismatchError, match="fused: checkpoint true, here null"):
        KINDS["AdamW, foreach"].build(0).contract.restore(fused)


# The proof of restarts, which takes any trainer, says the same


def make_run(directory: Path, kind: str) -> System:
    "A run for `prove_restart`, built as it was at the newest checkpoint in its folder."
    warnings.simplefilter("ignore")
    newest = max((int(path.stem.removeprefix("step-")) for path in directory.glob("**/step-*.safetensors")), default=0)
    start(replace(KINDS[kind], stop=0))  # seeds
    return KINDS[kind].build(newest)


# What its workers have read ahead is no state, since they read it again; but it lies in the loader, so the audit asks,
# unless they happened to have read just as far.
IN_FLIGHT = {"StatefulDataLoader, 2 workers": "state outside the contract did not survive: loader._iterator._task_info"}


@pytest.mark.parametrize("kind", HERE, ids=by_name)
def test_every_kind_is_judged_by_the_proof_of_restarts_and_missed_in_it_when_it_is_lost(kind):
    proof = prove_restart(partial(make_run, kind=kind.name), steps=kind.steps, interrupt_at=[kind.stop or 1],
                          how="clean", resumes=1, in_process=True, progress_bar=False)
    if not kind.resumes:
        assert proof.verdict is Verdict.DIVERGENT, str(proof)
        return
    if kind.name in IN_FLIGHT:
        assert proof.verdict in (Verdict.NOT_EXERCISED, Verdict.EQUIVALENT), str(proof)
        assert (IN_FLIGHT[kind.name] in str(proof)) == (proof.verdict is Verdict.NOT_EXERCISED), str(proof)
        return
    # SGD without momentum keeps nothing, and not each run draws from the global generators
    idle = set(proof.not_exercised)
    assert proof.verdict is (Verdict.NOT_EXERCISED if idle else Verdict.EQUIVALENT), str(proof)
    assert idle <= {"optimizer", "rng"} - {kind.lost}
    outcomes = {knocked.participant: knocked.outcome for knocked in proof.knockouts}
    assert outcomes["model"] == "caught" and outcomes.get(kind.lost, "caught") == "caught"


@pytest.mark.parametrize("kind", ["accumulated gradients", "a parameter group added later", "LBFGS"])
def test_the_proof_of_restarts_finds_a_larger_system_equivalent(kind):
    interrupted = {"accumulated gradients": [2, 6]}.get(kind, [2, 5])
    proof = prove_restart(partial(make_run, kind=kind), steps=9, interrupt_at=interrupted, how="clean", resumes=2,
                          in_process=True, progress_bar=False, knock_out=False)
    assert proof.verdict is Verdict.EQUIVALENT, str(proof)


def test_the_proof_of_restarts_finds_gradients_that_nobody_declared():
    proof = prove_restart(partial(make_run, kind="accumulated gradients, not declared"), steps=9, interrupt_at=[6],
                          how="clean", in_process=True, progress_bar=False, knock_out=False)
    assert proof.verdict is Verdict.DIVERGENT
    assert "step 8" in str(proof) and "model.0.weight" in str(proof)


def test_a_killed_run_with_unfinished_gradients_goes_on_as_the_same_run():
    proof = prove_restart(partial(make_run, kind="accumulated gradients"), steps=8, interrupt_at=[6], how="sigkill",
                          boundaries=("before_forward", "after_publication"), progress_bar=False, knock_out=False)
    assert proof.verdict is Verdict.EQUIVALENT, json.dumps(str(proof))
