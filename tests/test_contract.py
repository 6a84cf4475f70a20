"""The contract beyond its notebook: every kind of state, every refusal, and every way in which a restore can fail."""

import copy
import json
import math
import os
import random
import subprocess
import sys
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fault_tolerant_transformer_lab import contract as chapter
from fault_tolerant_transformer_lab.contract import (
    Accumulation,
    CheckpointError,
    CheckpointMismatchError,
    Contract,
    ContractError,
    EnvironmentMismatchError,
    MemoryTensor,
    ModuleFlags,
    NamedGenerator,
    PlainState,
    Progress,
    RandomGenerators,
    SavedState,
    Segment,
    environment_identity,
    format_path,
    freeze,
    generators_undisturbed,
    state_tree,
    tensor_key,
    walk,
)


def raw(leaf):
    "A leaf as something that compares by bits."
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), repr(leaf)
    flat = leaf.detach().contiguous().reshape(-1)
    return str(leaf.dtype), tuple(leaf.shape), bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def bits(contract):
    return {format_path(path): raw(leaf) for path, leaf in walk(contract.capture(step=counted(contract)).tree)}


def counted(contract):
    return None if any(isinstance(p, Progress) for p in contract.participants.values()) else 0


@pytest.fixture(autouse=True)
def undisturbed():
    "Each test leaves threads, dtype, switches and generators as it found them."
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    with generators_undisturbed():
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


class Holder:
    "A participant that holds a dict, and replaces it."

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)


# Trees


def float64_bits(value):
    return np.float64(value).tobytes()


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
tensors = st.integers(0, 5).map(lambda n: torch.arange(n, dtype=torch.float32))
keys = st.text(max_size=4) | st.integers()
trees = st.recursive(
    plain | tensors,
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(keys, inner, max_size=3)
    | st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
    max_leaves=12,
)


def same(a, b):
    "Equal in type and value at every place."
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return raw(a) == raw(b)
    if isinstance(a, dict):
        return list(a) == list(b) and [type(k) for k in a] == [type(k) for k in b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return float64_bits(a) == float64_bits(b) if isinstance(a, float) else a == b


@given(trees)
@settings(max_examples=200, deadline=None)
def test_any_representable_tree_is_copied_exactly_and_restored_exactly(tree):
    copied = state_tree(tree)
    assert same(copied, tree)
    contract = Contract(holder=Holder(tree=tree))
    saved = freeze(contract.capture(step=0))
    other = Holder(tree="something else")
    Contract(holder=other).restore(saved)
    assert same(other.state["tree"], tree)


class Colour(IntEnum):
    RED = 1


class Shade(Enum):
    DARK = 1


@dataclass(slots=True)
class Slotted:
    best: int


Point = namedtuple("Point", "x y")

REFUSED = [
    ({1, 2}, "a set: a set has no order; store sorted(x)"),
    (frozenset([1]), "a frozenset: a set has no order; store sorted(x)"),
    (np.ones(2), "a numpy.ndarray: store torch.from_numpy(x)"),
    (np.float64(1.0), "a numpy.float64: store x.item()"),
    (np.int64(1), "a numpy.int64: store x.item()"),
    (np.bool_(True), "x.item()"),
    (np.random.default_rng(0), "NamedGenerator(x)"),
    (torch.Generator(), "NamedGenerator(x)"),
    (1j, "a complex: store [x.real, x.imag]"),
    (bytearray(b"a"), "a bytearray: store bytes(x)"),
    (range(3), "a range: store [x.start, x.stop, x.step]"),
    (torch.Size([1]), "a torch.Size: store list(x)"),
    (torch.float32, "store str(x)"),
    (torch.device("cpu"), "store str(x)"),
    (defaultdict(int), "a subclass of dict; store dict(x)"),
    (deque([1], maxlen=2), "a collections.deque: store list(x) and build the deque again, with its maxlen"),
    (Point(1, 2), "a subclass of tuple; store tuple(x)"),
    (Colour.RED, "a subclass of int; store int(x)"),
    (lambda: 0, "a function: code is no state"),
    (print, "code is no state"),
    (int, "code is no state"),
    (nn.Linear(1, 1), "store x.state_dict()"),
    (torch.optim.SGD([torch.zeros(1)]), "store x.state_dict(), or leave it out here and make it a participant"),
    (object(), "an object: store its fields as plain values"),
    (SimpleNamespace(best=1), "leave it out here and make it a participant of its own: PlainState(x)"),
    (Slotted(1), "PlainState(x)"),
    (random.Random(0), "leave it out here and make it a participant of its own: NamedGenerator(x)"),
    (np.random.RandomState(0), "NamedGenerator(x)"),
    (random, "a module: code is no state"),
    (MappingProxyType({"a": 1}), "a mappingproxy: store dict(x)"),
    (ChainMap({}), "store dict(x)"),
    (iter([1]), "a list_iterator: an iterator is used up by reading it; store how many items were taken"),
    ((n for n in [1]), "store how many items were taken"),
    (Shade.DARK, "Shade: store x.name, and look it up in its class again"),
    (datetime(2024, 1, 2), "store x.isoformat(), and read it with fromisoformat()"),
    (timedelta(days=1), "store [x.days, x.seconds, x.microseconds]"),
    (Path("a"), "store str(x)"),
    (Decimal("0.1"), "a decimal.Decimal: store str(x)"),
    (np.complex64(1j), "a numpy.complex64: store str(x)"),
    (np.datetime64("2024-01-02"), "a numpy.datetime64: store str(x)"),
    ({(1, 2): 3}, "a dict with the key [1, 2], a tuple: keys are str or int"),
    ({None: 3}, "a dict with the key null, a NoneType: keys are str or int"),
    ({True: 3}, "a dict with the key true, a bool: keys are str or int"),
    ({1.5: 3}, "a dict with the key 1.5, a float: keys are str or int"),
]


REFUSED_IDS = [f"{type(value).__name__}-{i}" for i, (value, _) in enumerate(REFUSED)]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=REFUSED_IDS)
def test_what_cannot_be_represented_is_refused_with_path_and_remedy(value, message):
    contract = Contract(sampler=Holder(seen=[0, {"deep": (1, value)}]))
    with pytest.raises(ContractError) as refused:
        contract.capture(step=0)
    assert str(refused.value).startswith("sampler.seen[1].deep[1] is ")
    assert message in str(refused.value)


@given(trees, st.data())
@settings(max_examples=100, deadline=None)
def test_a_set_anywhere_in_a_tree_is_found(tree, data):
    places = [path for path, _ in walk(tree)]
    if not places:
        return
    at = data.draw(st.sampled_from(places))

    def planted(value, path):
        if path == at:
            return {1}
        if type(value) in (list, tuple):
            return type(value)(planted(item, (*path, i)) for i, item in enumerate(value))
        if isinstance(value, dict):
            return type(value)((key, planted(item, (*path, key))) for key, item in value.items())
        return value

    with pytest.raises(ContractError) as refused:
        state_tree(planted(tree, ()), ("p",))
    assert str(refused.value).startswith(f"{format_path(('p', *at))} is a set: ")


def mkldnn_tensor():
    return torch.ones(2, 2).to_mkldnn()


REFUSED_TENSORS = {
    "coo": (lambda: torch.eye(3).to_sparse(), "to_dense()"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "to_dense()"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "int_repr()"),
    "nested strided": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind()"),
    "nested jagged": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "unbind()"),
    "meta": (lambda: torch.empty(2, device="meta"), "to_empty()"),
    "complex128": (lambda: torch.zeros(2, dtype=torch.complex128), "torch.view_as_real(x)"),
    "complex32": (lambda: torch.zeros(2, dtype=torch.complex32), "x.view(torch.uint8)"),
    "float8_e8m0fnu": (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.float8_e8m0fnu), "x.view(torch.uint8)"),
    "uninitialized": (lambda: nn.LazyLinear(2).weight, "run one forward pass"),
    "mkldnn": (mkldnn_tensor, "to_dense()"),
    "subclass": (lambda: torch.ones(2).as_subclass(type("Special", (torch.Tensor,), {})), "store its plain tensors"),
}


@pytest.mark.parametrize("name", REFUSED_TENSORS)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_more_than_bytes_are_refused(name):
    make, remedy = REFUSED_TENSORS[name]
    with pytest.raises(ContractError) as refused:
        Contract(model=Holder(weight=make())).capture(step=0)
    assert str(refused.value).startswith("model.weight is a") and remedy in str(refused.value)


def test_a_dtensor_is_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(ContractError, match=r"model.weight is a DTensor: .*full_tensor\(\)"):
            Contract(model=Holder(weight=sharded)).capture(step=0)
    finally:
        torch.distributed.destroy_process_group()


def test_cycles_and_deep_nesting_are_refused_without_a_recursion_error():
    a, b = {}, [1]
    a["b"], deep = b, []
    b.append(a)
    with pytest.raises(ContractError, match=r"p.x.b\[1\] is a dict that contains itself"):
        state_tree({"x": a}, ("p",))
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ContractError, match="nested deeper than 64 levels"):
        state_tree({"x": deep}, ("p",))
    shared = [1]
    assert state_tree({"x": shared, "y": [shared, shared]}) == {"x": [1], "y": [[1], [1]]}  # no cycle, only met again


def test_a_snapshot_keeps_its_plain_values_while_the_run_goes_on():
    holder = Holder(counts=Counter(a=1), order=[1, 2])
    tree = Contract(holder=holder).capture(step=0).tree["holder"]
    holder.state["counts"]["a"] += 1
    holder.state["order"].append(3)
    assert tree == {"counts": Counter(a=1), "order": [1, 2]} and type(tree["counts"]) is Counter


# Tensors


def samples(dtype):
    "Tensors of one dtype in every awkward form."
    n = 24
    if dtype == torch.bool:
        base = torch.arange(n) % 3 == 0
    elif dtype.is_floating_point or dtype.is_complex:
        base = torch.linspace(-3, 3, n).to(dtype)
    else:
        base = torch.arange(n).to(dtype)
    grid = base.reshape(2, 3, 4)
    return {
        "0-dim": base[3],
        "no elements": base[:0],
        "no elements, 3-dim": base[:0].reshape(0, 3, 4),
        "contiguous": grid,
        "transposed": grid.transpose(0, 2),
        "strided": base[1::2],
        "offset": base[5:],
        "one element": base[7:8],
        "expanded": base[2].expand(3, 2),
    }


@pytest.mark.parametrize("dtype", sorted(chapter.DTYPES, key=str), ids=str)
def test_every_dtype_in_every_form_comes_back_bit_for_bit(dtype):
    original = samples(dtype)
    saved = freeze(Contract(holder=Holder(**original)).capture(step=0))
    fresh = Holder()
    used = Holder(**{name: tensor.clone() for name, tensor in samples(dtype).items()})
    for tensor in used.state.values():
        tensor.contiguous().view(torch.uint8 if tensor.numel() and tensor.dim() else tensor.dtype).zero_()
    addresses = {name: tensor.data_ptr() for name, tensor in used.state.items()}
    for holder in (fresh, used):
        Contract(holder=holder).restore(saved)
        assert {k: raw(v) for k, v in holder.state.items()} == {k: raw(v) for k, v in original.items()}
    assert {name: tensor.data_ptr() for name, tensor in used.state.items()} == addresses  # filled in place


def test_special_values_keep_their_bits():
    words = [0x7FC00001, 0x7F800001, -0x3FFFFF, 0x00000001, -0x80000000]  # three nans, a denormal, -0.0
    nans = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    saved = freeze(Contract(holder=Holder(x=nans)).capture(step=0))
    holder = Holder(x=torch.zeros(5))
    Contract(holder=holder).restore(saved)
    assert holder.state["x"].view(torch.int32).tolist() == nans.view(torch.int32).tolist()


def test_conjugated_and_negated_views_are_saved_as_they_look():
    x = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    views = {"x": x, "conjugate": x.conj(), "negated": x.conj().imag}
    snapshot = Contract(holder=Holder(**views)).capture(step=0)
    assert not any(leaf.is_conj() or leaf.is_neg() for _, leaf in walk(snapshot.tree))  # their bytes are their values
    saved = freeze(snapshot)
    holder = Holder()
    Contract(holder=holder).restore(saved)
    assert holder.state["conjugate"].tolist() == [1 - 2j, 3 + 4j] and holder.state["negated"].tolist() == [-2.0, 4.0]


def test_tied_tensors_are_stored_once_and_stay_tied():
    x = torch.arange(4.0)
    original = {"a": x, "b": x, "view": x.view(2, 2), "c": x.view(4)}
    saved = freeze(Contract(holder=Holder(**original)).capture(step=0))
    tree = saved.tree["holder"]
    assert tree["a"] is tree["b"] is tree["c"] and tree["view"] is not tree["a"]
    fresh, separate = Holder(), Holder(a=torch.zeros(4), b=torch.zeros(4), c=torch.zeros(4), view=torch.zeros(2, 2))
    for holder in (fresh, separate):
        Contract(holder=holder).restore(saved)
        assert tensor_key(holder.state["a"]) == tensor_key(holder.state["b"]) == tensor_key(holder.state["c"])
        assert holder.state["a"].tolist() == [0, 1, 2, 3]


def test_two_saved_tensors_never_fill_one_live_tensor():
    x = torch.zeros(2)
    holder = Holder(a=x, b=x)
    saved = freeze(Contract(holder=Holder(a=torch.ones(2), b=torch.full((2,), 2.0))).capture(step=0))
    Contract(holder=holder).restore(saved)
    assert holder.state["a"].tolist() == [1, 1] and holder.state["b"].tolist() == [2, 2]


class Shadow:
    "Averages that are the model's own weights until their first update, as many a loop has them."

    def __init__(self, model):
        self.shadow = dict(model.state_dict())

    def update(self, model):
        self.shadow = {name: 0.5 * self.shadow[name] + 0.5 * now for name, now in model.state_dict().items()}

    def state_dict(self):
        return dict(self.shadow)

    def load_state_dict(self, state):
        self.shadow = dict(state)


def best_of(model):
    return PlainState(SimpleNamespace(best=dict(model.state_dict())))


def part_of(model):
    return PlainState(SimpleNamespace(best=model.weight.detach()[1:]))


@pytest.mark.parametrize("make, apart", [
    (Shadow, lambda shadow, model: shadow.update(model)),
    (best_of, lambda plain, model: setattr(plain.obj, "best", {k: v + 2 for k, v in model.state_dict().items()})),
    (part_of, lambda plain, model: setattr(plain.obj, "best", model.weight.detach()[1:] + 2)),
])
@pytest.mark.parametrize("only", [None, ["other", "fragile"]])
@pytest.mark.parametrize("fails", [False, True])
def test_a_new_process_may_hold_in_one_memory_what_had_come_apart(make, apart, only, fails):
    class FailsOnce(Holder):
        def load_state_dict(self, state):
            if fails and self.state["value"] == "new":
                self.state = {"value": "failed"}
                raise ValueError("no")
            super().load_state_dict(state)

    def run(value):
        model = nn.Linear(3, 3)
        return Contract(model=model, other=make(model), fragile=FailsOnce(value=value))

    def states(contract):
        trees = {name: contract.participants[name].state_dict() for name in ("model", "other")}
        return {format_path(path): raw(leaf) for path, leaf in walk(trees)}

    direct, here = run("old"), run("new")
    apart(direct.participants["other"], direct.participants["model"])
    with torch.no_grad():
        direct.participants["model"].weight.add_(1)
    saved, before = freeze(direct.capture(step=1)), states(here)
    if fails:
        with pytest.raises(ContractError, match="every participant is as it was before"):
            here.restore(saved, only=only)
        assert states(here) == before
        here.participants["fragile"].state = {"value": "old"}
    here.restore(saved, only=only)
    kept = {path: leaf for path, leaf in before.items() if only and path.startswith("model")}
    assert states(here) == states(direct) | kept


def test_two_objects_may_begin_with_one_tensor_and_two_fields_with_one_memory():
    saved = freeze(Contract(a=PlainState(SimpleNamespace(x=torch.ones(3), y=torch.full((3,), 2.0))),
                            b=PlainState(SimpleNamespace(z=torch.full((3,), 3.0)))).capture(step=0))
    memory = torch.zeros(4)
    a, b = SimpleNamespace(x=memory[:3], y=memory[1:]), SimpleNamespace(z=memory[:3])
    Contract(a=PlainState(a), b=PlainState(b)).restore(saved)
    assert [t.tolist() for t in (a.x, a.y, b.z)] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


class Overlapping(nn.Module):
    "Two parameters, in one memory or not."

    def __init__(self, kind):
        super().__init__()
        memory = torch.arange(12.0)
        first = memory[:9].reshape(3, 3)
        second = {"turned": first.t(), "windows": memory[3:].reshape(3, 3), "columns": first[:, :1],
                  "apart": memory[9:].reshape(3, 1)}[kind.split(" ")[0]]
        self.first, self.second = (nn.Parameter(t.clone() if "cloned" in kind else t) for t in (first, second))


@pytest.mark.parametrize("kind", ["turned", "windows", "columns"])
def test_a_module_whose_parameters_overlap_takes_only_what_agrees(kind):
    source, here = Overlapping(f"{kind} cloned"), Overlapping(kind)
    Contract(model=here).restore(freeze(Contract(model=source).capture(step=0)))  # equal where they overlap
    Contract(model=source).restore(freeze(Contract(model=here).capture(step=0)))
    with torch.no_grad():
        source.second.add_(1)
    saved, before = freeze(Contract(model=source).capture(step=0)), bits(Contract(model=here))
    with pytest.raises(CheckpointMismatchError, match=r"model\.(first|second): checkpoint not in the memory of"):
        Contract(model=here).restore(saved)
    assert bits(Contract(model=here)) == before
    Contract(model=Overlapping("apart")).restore(freeze(Contract(model=Overlapping("apart cloned")).capture(step=0)))


def flattened(tensors):
    "One memory for tensors that had each their own, and the parts of it, as a flattening optimizer makes them."
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    parts = flat.split([tensor.numel() for tensor in tensors])
    return flat, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


class EveryOtherColumn(nn.Module):
    "Two parameters in one memory that overlap nowhere, though each reaches over the other."

    def __init__(self):
        super().__init__()
        memory = torch.randn(4, 8)
        self.first, self.second = (nn.Parameter(memory[:, begin::2]) for begin in (0, 1))

    def forward(self, x):
        return torch.tanh(x @ self.first.t()) @ self.second.t()


def in_good_order(kind):
    "A model, a contract and a step; memory is shared, or a weight is computed, as sound runs do it."
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    more = {}
    if kind == "every other column":
        model = EveryOtherColumn()
    elif kind == "tied weights":
        model.append(nn.Linear(4, 4, bias=False))
        model[3].weight = model[0].weight
    elif kind == "weights computed":
        nn.utils.parametrizations.weight_norm(model[0])
        nn.utils.parametrizations.spectral_norm(model[2])
    parameters = list(model.parameters())
    if kind in ("one flat memory", "an optimizer of one flat parameter"):
        flat, parts = flattened(parameters)
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
        if kind == "an optimizer of one flat parameter":
            whole = nn.Parameter(flat)
            whole.grad, gradients = flattened([torch.zeros_like(part) for part in parts])
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            parameters = [whole]
    elif kind == "an optimizer of some":
        parameters = list(model[2].parameters())
    elif kind == "an average with the model's buffers":
        average = more["average"] = torch.optim.swa_utils.AveragedModel(model)
        average.module[1]._buffers.update(model[1]._buffers)
    optimizer = torch.optim.AdamW(parameters, lr=0.1)

    def step():
        optimizer.zero_grad(set_to_none=False)
        model(torch.arange(12.0).reshape(3, 4)).square().mean().backward()
        optimizer.step()
        if kind == "moments in one memory":
            moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
            for moment, part in zip(moments, flattened(moments)[1], strict=True):
                moment.set_(part)
        if more:
            more["average"].update_parameters(model)

    return model, Contract(model=model, optimizer=optimizer, **more), step


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kind", [
    "every other column", "tied weights", "weights computed", "one flat memory", "moments in one memory",
    "an optimizer of one flat parameter", "an optimizer of some", "an average with the model's buffers"])
def test_what_a_sound_run_shares_or_computes_is_restored_where_it_lies(kind, used):
    direct, here = in_good_order(kind), in_good_order(kind)
    for _ in range(3):
        direct[2]()
    saved = freeze(direct[1].capture(step=3))
    if used:
        here[2]()
    assert bits(here[1]) != bits(direct[1])
    memory = [parameter.data_ptr() for parameter in here[0].parameters()]
    here[1].restore(saved)
    assert [parameter.data_ptr() for parameter in here[0].parameters()] == memory
    if kind == "an average with the model's buffers":
        assert here[1].participants["average"].module[1].running_mean is here[0][1].running_mean
    direct[2](), here[2]()
    assert bits(here[1]) == bits(direct[1])


@pytest.mark.parametrize("here", [torch.zeros(0, 5), torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(3)])
def test_an_empty_tensor_comes_back_with_its_dtype_and_shape(here):
    saved = freeze(Contract(a=PlainState(SimpleNamespace(x=torch.zeros(0, 2, dtype=torch.int64)))).capture(step=0))
    other = SimpleNamespace(x=here)
    Contract(a=PlainState(other)).restore(saved)
    assert (other.x.dtype, other.x.shape) == (torch.int64, (0, 2))


def test_no_later_update_reaches_a_frozen_snapshot():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    contract = Contract(model=model, optimizer=optimizer)
    saved = freeze(contract.capture(step=0))
    before = saved.tree["model"]["weight"].load()
    contract.restore(saved)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert torch.equal(saved.tree["model"]["weight"].load(), before) and not torch.equal(model.weight, before)


def test_a_restore_fills_parameters_and_moments_in_place():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    contract = Contract(model=model, optimizer=optimizer)
    saved = freeze(contract.capture(step=1))
    moment = optimizer.state[model.weight]["exp_avg"]
    addresses = model.weight.data_ptr(), moment.data_ptr()
    optimizer.step()
    contract.restore(saved)
    assert (model.weight.data_ptr(), optimizer.state[model.weight]["exp_avg"].data_ptr()) == addresses
    assert torch.equal(moment, saved.tree["optimizer"]["state"][0]["exp_avg"].load())


def test_a_backward_pass_through_restored_weights_fails_instead_of_mixing_two_states():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    contract = Contract(model=model)
    saved = freeze(contract.capture(step=0))

    class FromFile(MemoryTensor):
        def load_into(self, out):  # as a file read does it, past autograd
            out.detach().numpy()[...] = self.data.numpy()

    read = {name: FromFile(stored.data) for name, stored in saved.tree["model"].items()}
    loss = model(torch.ones(1, 2)).sum()
    contract.restore(replace(saved, tree={"model": read}))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_run_while_a_module_or_optimizer_loads_and_a_failing_one_is_rolled_back():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    called = []

    def fails(*_):
        called.append("fails")
        if len(called) == 1:
            raise ValueError("a hook")

    for participant, register in ((model, model.register_load_state_dict_post_hook),
                                  (optimizer, optimizer.register_load_state_dict_post_hook)):  # fmt: skip
        called.clear()
        saved = freeze(Contract(part=participant).capture(step=0))
        handle = register(fails)
        with torch.no_grad():
            model.weight.add_(1)
        before = bits(Contract(part=participant))
        with pytest.raises(ContractError, match="part: load_state_dict.* a hook; every participant is as it was"):
            Contract(part=participant).restore(saved)
        assert bits(Contract(part=participant)) == before and called == ["fails", "fails"]
        handle.remove()


def test_a_plain_module_is_filled_and_one_with_its_own_loading_is_asked():
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(300))
    contract = Contract(model=model)
    saved = freeze(contract.capture(step=0))
    calls = []
    model.load_state_dict = calls.append  # an override makes it somebody's own code, which must be called
    contract.restore(saved)
    assert len(calls) == 1
    del model.load_state_dict
    with torch.no_grad():
        for layer in model:
            layer.weight.zero_()
    contract.restore(saved)
    assert all(torch.equal(layer.weight, saved.tree["model"][f"{i}.weight"].load()) for i, layer in enumerate(model))


def test_new_moments_take_the_strides_of_their_parameter():
    def convolution():
        layer = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return layer, torch.optim.AdamW(layer.parameters())

    layer, optimizer = convolution()
    layer(torch.ones(1, 3, 5, 5).to(memory_format=torch.channels_last)).sum().backward()
    optimizer.step()
    saved = freeze(Contract(model=layer, optimizer=optimizer).capture(step=1))
    other, fresh = convolution()
    Contract(model=other, optimizer=fresh).restore(saved)
    for key in ("exp_avg", "exp_avg_sq"):
        assert fresh.state[other.weight][key].stride() == optimizer.state[layer.weight][key].stride()
        assert torch.equal(fresh.state[other.weight][key], optimizer.state[layer.weight][key])


def test_sliding_windows_over_one_memory_are_never_filled_in_place():
    windows = torch.arange(4.0).as_strided((3, 2), (1, 1))
    holder = Holder(w=windows)
    independent = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    Contract(holder=holder).restore(freeze(Contract(holder=Holder(w=independent)).capture(step=0)))
    assert torch.equal(holder.state["w"], independent)


@pytest.mark.parametrize(
    ("size", "stride", "overlaps"),
    [((), (), False), ((3,), (1,), False), ((3,), (0,), True), ((1,), (0,), False), ((0, 3), (0, 0), False),
     ((2, 3), (3, 1), False), ((3, 2), (1, 3), False), ((3, 2), (1, 1), True), ((2, 3), (2, 1), True),
     ((2, 2, 2), (2, 1, 8), False), ((2, 2), (5, 2), False)],
)  # fmt: skip
def test_overlap_is_told_from_strides(size, stride, overlaps):
    tensor = torch.zeros(64).as_strided(size, stride)
    assert chapter._overlaps_itself(tensor) is overlaps


def test_a_model_on_the_meta_device_is_refused_instead_of_silently_left_empty():
    saved = freeze(Contract(model=nn.Linear(2, 2)).capture(step=0))
    with torch.device("meta"):
        hollow = nn.Linear(2, 2)
    with pytest.raises(ContractError, match=r"model.weight is a tensor on the meta device.*to_empty\(\)"):
        Contract(model=hollow).restore(saved)


def test_an_expanded_buffer_is_refused_when_it_is_saved():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1).expand(4))
    with pytest.raises(ContractError, match=r"model.mask is an expanded tensor.*x.clone\(\)"):
        Contract(model=model).capture(step=0)


def test_parameters_that_require_gradients_and_inference_tensors_can_be_restored():
    parameter = nn.Parameter(torch.zeros(2))
    with torch.inference_mode():
        inference = torch.zeros(2)
    holder = Holder(p=parameter, i=inference)
    saved = freeze(Contract(holder=Holder(p=torch.ones(2), i=torch.ones(2))).capture(step=0))
    Contract(holder=holder).restore(saved)
    assert parameter.tolist() == [1, 1] and holder.state["i"].tolist() == [1, 1] and parameter.requires_grad


# Modules


def test_module_versions_reach_the_loading_module():
    seen = []

    class Versioned(nn.Module):
        _version = 7

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    class Wrapper:
        def __init__(self):
            self.inner = nn.Sequential(Versioned())

        def state_dict(self):
            return {"inner": self.inner.state_dict()}

        def load_state_dict(self, state):
            self.inner.load_state_dict(state["inner"])

    for contract in (Contract(model=nn.Sequential(Versioned())), Contract(wrapper=Wrapper())):
        seen.clear()
        contract.restore(freeze(contract.capture(step=0)))
        assert seen == [7]


def test_batch_norm_dropout_and_averaged_weights_resume_exactly():
    def build():
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        contract = Contract(model=model, optimizer=optimizer, ema=average, rng=RandomGenerators())
        return model, optimizer, average, contract

    def steps(n, model, optimizer, average, _):
        for _ in range(n):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)

    direct = build()
    steps(3, *direct)
    saved = freeze(direct[3].capture(step=3))
    steps(3, *direct)
    torch.manual_seed(1234)
    resumed = build()
    resumed[3].restore(saved)
    steps(3, *resumed)
    assert bits(resumed[3]) == bits(direct[3])


def test_every_difference_in_a_module_is_listed_and_nothing_is_changed():
    saved = freeze(Contract(model=nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2)})).capture(step=0))
    other = nn.ModuleDict({"a": nn.Linear(2, 4), "b": nn.Linear(2, 2).double(), "c": nn.Linear(1, 1, bias=False)})
    contract = Contract(model=other)
    before = bits(contract)
    with pytest.raises(CheckpointMismatchError) as refused:
        contract.restore(saved)
    assert [str(field) for field in refused.value.fields] == [
        'model.a.weight: checkpoint "float32 (3, 2)", requested "float32 (4, 2)"',
        'model.a.bias: checkpoint "float32 (3,)", requested "float32 (4,)"',
        'model.b.weight: checkpoint "float32 (2, 2)", requested "float64 (2, 2)"',
        'model.b.bias: checkpoint "float32 (2,)", requested "float64 (2,)"',
        'model.c.weight: checkpoint absent, requested "float32 (1, 1)"',
    ]
    assert bits(contract) == before


def test_tied_and_untied_models_do_not_take_each_other():
    def model(tie):
        pair = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
        if tie:
            pair[1].weight = pair[0].weight
        return Contract(model=pair)

    for tie in (True, False):
        with pytest.raises(CheckpointMismatchError, match=r"model.1.weight: checkpoint .*tied.*, here .*tied"):
            model(tie).restore(freeze(model(not tie).capture(step=0)))
        model(tie).restore(freeze(model(tie).capture(step=0)))


def test_a_lazy_module_takes_the_checkpoints_shape():
    ready = nn.Sequential(nn.LazyLinear(3))
    ready(torch.ones(1, 2))
    fresh = nn.Sequential(nn.LazyLinear(3))
    Contract(model=fresh).restore(freeze(Contract(model=ready).capture(step=0)))
    assert torch.equal(fresh(torch.ones(1, 2)), ready(torch.ones(1, 2)))


def test_a_module_with_extra_state_takes_part_and_is_rolled_back():
    class Extra(nn.Linear):
        extra = 1

        def get_extra_state(self):
            return {"extra": self.extra}

        def set_extra_state(self, state):
            self.extra = state["extra"]
            if self.extra == 99:
                raise ValueError("99 is no good")

    model = Extra(2, 2)
    contract = Contract(model=model)
    good = freeze(contract.capture(step=0))
    model.extra = 99
    bad = freeze(contract.capture(step=0))
    model.extra = 5
    with torch.no_grad():
        model.weight.fill_(5)
    with pytest.raises(ContractError, match=r"model: load_state_dict\(\) raised ValueError: 99 is no good"):
        contract.restore(bad)
    assert model.extra == 5 and model.weight.eq(5).all()
    contract.restore(good)
    assert model.extra == 1


def test_a_compiled_module_keeps_its_names_and_is_an_environment_fact():
    model = nn.Linear(2, 2)
    plain_contract, compiled = Contract(model=model), Contract(model=torch.compile(model, backend="eager"))
    assert list(compiled.capture(step=0).tree["model"]) == ["weight", "bias"]
    saved = freeze(plain_contract.capture(step=0))
    with pytest.raises(EnvironmentMismatchError, match="compile: checkpoint false, here true"):
        compiled.restore(saved)
    compiled.restore(saved, allow_environment_change=True)
    in_place = nn.Sequential(nn.Linear(2, 2))
    in_place[0].compile(backend="eager")
    assert environment_identity([in_place])["decides"]["compile"] is True


# Optimizers and schedulers

OPTIMIZERS = [
    ("Adadelta", {}), ("Adafactor", {}), ("Adagrad", {}), ("Adam", {}), ("Adam", {"amsgrad": True}), ("Adamax", {}),
    ("AdamW", {}), ("AdamW", {"fused": True}), ("AdamW", {"foreach": True}), ("AdamW", {"lr": torch.tensor(0.01)}),
    ("ASGD", {}), ("LBFGS", {}), ("NAdam", {}), ("RAdam", {}), ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Rprop", {}), ("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}), ("Muon", {}),
]  # fmt: skip


def optimized(name, options):
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    model = nn.Linear(4, 4, bias=False)
    optimizer = getattr(torch.optim, name)(model.parameters(), **copy.deepcopy(options))
    return model, optimizer, Contract(model=model, optimizer=optimizer)


def optimize(n, model, optimizer, _):
    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4)) - 1).square().sum()
        loss.backward()
        return loss

    for _ in range(n):
        optimizer.step(closure)


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(OPTIMIZERS)])
def test_every_optimizer_resumes_exactly_fresh_or_used_and_goes_back_to_the_start(name, options):
    direct = optimized(name, options)
    start = freeze(direct[2].capture(step=0))
    optimize(3, *direct)
    saved = freeze(direct[2].capture(step=3))
    optimize(3, *direct)
    for steps_before in (0, 2):
        torch.manual_seed(99)
        resumed = optimized(name, options)
        optimize(steps_before, *resumed)
        resumed[2].restore(saved)
        optimize(3, *resumed)
        assert bits(resumed[2]) == bits(direct[2])
    direct[2].restore(start)
    assert bits(direct[2]) == {format_path(p): raw(leaf.load() if isinstance(leaf, MemoryTensor) else leaf)
                               for p, leaf in walk(start.tree)}  # fmt: skip
    optimize(6, *direct)
    assert bits(direct[2]) == bits(resumed[2])


S = torch.optim.lr_scheduler
SCHEDULERS = {
    "LambdaLR": lambda o: S.LambdaLR(o, lambda epoch: 0.9**epoch),
    "StepLR": lambda o: S.StepLR(o, 2),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [2, 4]),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.1, total_steps=20),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.01, 0.1, 3),
    "SequentialLR": lambda o: S.SequentialLR(o, [S.LinearLR(o), S.CosineAnnealingLR(o, 5)], [3]),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.LinearLR(o), S.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def scheduled(name):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    return model, optimizer, scheduler, Contract(model=model, optimizer=optimizer, scheduler=scheduler)


def schedule(n, model, optimizer, scheduler, _):
    rates = []
    for _ in range(n):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, S.ReduceLROnPlateau) else []))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore")
def test_every_scheduler_resumes_with_the_learning_rate_of_every_step(name):
    direct = scheduled(name)
    schedule(3, *direct)
    saved = freeze(direct[3].capture(step=3))
    rates = schedule(6, *direct)
    resumed = scheduled(name)
    resumed[3].restore(saved)
    assert schedule(6, *resumed) == rates
    assert bits(resumed[3]) == bits(direct[3])


@pytest.mark.filterwarnings("ignore")
def test_another_kind_of_scheduler_is_refused():
    saved = freeze(scheduled("CosineAnnealingLR")[3].capture(step=0))
    with pytest.raises(CheckpointMismatchError, match="scheduler.T_max: checkpoint present, here absent"):
        scheduled("StepLR")[3].restore(saved)


def test_a_gradient_scaler_takes_part_and_a_disabled_one_is_another():
    enabled, disabled = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", enabled=False)
    saved = freeze(Contract(scaler=enabled).capture(step=0))
    other = torch.amp.GradScaler("cpu")
    Contract(scaler=other).restore(saved)
    assert other.get_scale() == 8.0
    with pytest.raises(CheckpointMismatchError, match="scaler.scale: checkpoint present, here absent"):
        Contract(scaler=disabled).restore(saved)


def sequence(*later, milestones=(3,)):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    parts = [S.LinearLR(optimizer), *(make(optimizer) for make in later)]
    return Contract(scheduler=S.SequentialLR(optimizer, parts, list(milestones)))


@pytest.mark.filterwarnings("ignore")
def test_the_schedules_inside_of_a_schedule_are_compared_too():
    cosine, steps = (lambda o: S.CosineAnnealingLR(o, 5)), (lambda o: S.StepLR(o, 2))
    nested = lambda make: lambda o: S.ChainedScheduler([S.ExponentialLR(o, 0.9), make(o)])  # noqa: E731
    saved = freeze(sequence(steps).capture(step=0))
    sequence(steps).restore(saved)
    with pytest.raises(CheckpointMismatchError, match=r"scheduler._schedulers\[1\].T_max: checkpoint absent"):
        sequence(cosine).restore(saved)
    with pytest.raises(CheckpointMismatchError, match="scheduler._schedulers: checkpoint 2 schedulers, here 3"):
        sequence(steps, cosine, milestones=(3, 6)).restore(saved)
    deep = freeze(sequence(nested(steps)).capture(step=0))
    sequence(nested(steps)).restore(deep)
    with pytest.raises(CheckpointMismatchError, match=r"scheduler._schedulers\[1\]._schedulers\[1\].T_max"):
        sequence(nested(cosine)).restore(deep)


SAME_KEYS = {
    "LambdaLR": lambda o: S.LambdaLR(o, lambda done: 0.9),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda done: 0.9),
    "inside": lambda o: S.SequentialLR(o, [S.LambdaLR(o, lambda done: 0.9), S.ConstantLR(o)], [2]),
    "inside, multiplied": lambda o: S.SequentialLR(o, [S.MultiplicativeLR(o, lambda d: 0.9), S.ConstantLR(o)], [2]),
    "chained": lambda o: S.ChainedScheduler([S.LambdaLR(o, lambda done: 0.9), S.ConstantLR(o)]),
    "chained, multiplied": lambda o: S.ChainedScheduler([S.MultiplicativeLR(o, lambda d: 0.9), S.ConstantLR(o)]),
}


@pytest.mark.parametrize("saved_kind", SAME_KEYS)
@pytest.mark.filterwarnings("ignore")
def test_a_schedule_of_another_class_is_refused_also_where_its_keys_are_the_same(saved_kind):
    def contract_of(kind):
        return Contract(scheduler=SAME_KEYS[kind](torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)))

    saved = freeze(contract_of(saved_kind).capture(step=0))
    contract_of(saved_kind).restore(saved)
    for kind in SAME_KEYS.keys() - {saved_kind}:
        contract = contract_of(kind)
        before = bits(contract)
        with pytest.raises(CheckpointMismatchError, match="scheduler: checkpoint [A-Z]"):
            contract.restore(saved)
        assert bits(contract) == before


class Decay:
    "A schedule's function with state of its own."

    def __init__(self):
        self.calls = 0

    def __call__(self, done):
        self.calls += 1
        return 0.9**self.calls


def test_a_schedules_function_is_not_taken_for_an_object_and_each_group_needs_its_own():
    def contract_of(functions):
        groups = [{"params": nn.Linear(1, 1).parameters()} for _ in functions]
        return Contract(scheduler=S.LambdaLR(torch.optim.SGD(groups, lr=0.1), functions))

    def flat(done):
        return 1.0

    saved = {name: freeze(contract_of(functions).capture(step=0)) for name, functions in (
        ("function", [flat]), ("object", [Decay()]), ("two", [flat, flat]), ("lazy", [partial(flat)]))}
    contract_of([Decay()]).restore(saved["object"])
    contract_of([lambda done: 1.0]).restore(saved["function"])  # code is no state
    contract_of([flat]).restore(saved["lazy"])  # an object without attributes has none either
    contract_of([Decay()]).restore(saved["lazy"])  # and may get some later
    for name, here, told in (
        ("object", [flat], r"lr_lambdas\[0\]: checkpoint an object with state, here a function"),
        ("function", [Decay()], r"lr_lambdas\[0\]: checkpoint a function, here an object with state"),
        ("two", [flat], "scheduler.base_lrs: checkpoint 2 groups, here 1 groups"),
        ("function", [flat, flat], "scheduler.lr_lambdas: checkpoint 1 groups, here 2 groups"),
    ):
        with pytest.raises(CheckpointMismatchError, match=told):
            contract_of(here).restore(saved[name])


@pytest.mark.parametrize("moment", ["scaled", "unscaled", "stepped", "updated"])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_in_the_middle_of_an_update_is_refused(moment, enabled):
    model = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=enabled)
    contract = Contract(model=model, optimizer=optimizer, scaler=scaler)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    if moment != "scaled":
        scaler.unscale_(optimizer)
    if moment in ("stepped", "updated"):
        scaler.step(optimizer)
    if moment == "updated":
        scaler.update()
    if enabled and moment in ("unscaled", "stepped"):
        with pytest.raises(ContractError, match=f"scaler: gradients are {moment} and the scale is not updated.*update"):
            contract.capture(step=0)
    else:
        contract.capture(step=0)


@pytest.mark.parametrize("unscaled", [True, False])
def test_what_a_scaler_knew_of_an_update_that_was_given_up_is_forgotten_by_a_restore(unscaled):
    model = nn.Linear(3, 3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    contract = Contract(model=model, optimizer=optimizer, scaler=scaler)

    def begin():
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()

    def step():
        begin()
        scaler.step(optimizer)
        scaler.update()
        return bits(contract)

    step()
    saved = freeze(contract.capture(step=1))
    expected = step()
    begin()
    model.weight.grad.fill_(math.inf)  # given up after it was found to overflow
    if unscaled:
        scaler.unscale_(optimizer)
    else:
        scaler.step(optimizer)
    contract.restore(saved)
    assert step() == expected


@pytest.mark.parametrize("shared", [True, False])
def test_a_learning_rate_that_is_a_tensor_stays_that_tensor_and_is_never_filled_twice(shared):
    def make(values):
        rates = [torch.tensor(value) for value in values]
        layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
        groups = [{"params": layer.parameters(), "lr": rates[0 if shared else i]} for i, layer in enumerate(layers)]
        optimizer = torch.optim.AdamW(groups, lr=0.5, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False)
        return optimizer, Contract(optimizer=optimizer)

    saved = freeze(make([0.25, 0.125])[1].capture(step=0))
    optimizer, contract = make([0.5, 0.5])
    held = [(group["lr"], *group["betas"]) for group in optimizer.param_groups]
    contract.restore(saved)
    now = [(group["lr"], *group["betas"]) for group in optimizer.param_groups]
    assert all(a is b for before, after in zip(held, now, strict=True) for a, b in zip(before, after, strict=True))
    assert [rate.item() for rate, *_ in now] == ([0.25, 0.25] if shared else [0.25, 0.125])


def test_two_saved_learning_rates_are_never_put_into_one_tensor():
    def make(rates):
        groups = [{"params": nn.Linear(2, 2).parameters(), "lr": rate} for rate in rates]
        optimizer = torch.optim.AdamW(groups, lr=0.5, foreach=False)
        return optimizer, Contract(optimizer=optimizer)

    one = torch.tensor(0.5)
    saved = freeze(make([torch.tensor(0.25), torch.tensor(0.125)])[1].capture(step=0))
    optimizer, contract = make([one, one])
    contract.restore(saved)
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.25, 0.125]


def test_optimizers_that_do_not_fit_are_refused_before_anything_changes():
    def make(kind, groups=1, names=False, **options):
        layers = [nn.Linear(2, 2) for _ in range(groups)]
        parameters = [{"params": list(layer.named_parameters() if names else layer.parameters())} for layer in layers]
        return Contract(optimizer=kind(parameters, **options))

    def problem(saved, here):
        with pytest.raises(CheckpointMismatchError) as refused:
            here.restore(freeze(saved.capture(step=0)))
        return [field.field for field in refused.value.fields]

    adam, sgd = torch.optim.AdamW, torch.optim.SGD
    assert problem(make(adam), make(adam, groups=2)) == ["optimizer.param_groups"]
    assert problem(make(adam), make(adam, fused=True)) == ["optimizer.param_groups[0].fused"]
    assert problem(make(adam, amsgrad=True), make(adam)) == ["optimizer.param_groups[0].amsgrad"]
    others = {f"optimizer.param_groups[0].{key}" for key in ("betas", "eps", "amsgrad", "momentum", "nesterov")}
    assert others <= set(problem(make(sgd, lr=0.1), make(adam)))
    one, two = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    assert problem(Contract(optimizer=adam(one.parameters())), Contract(optimizer=adam(two.parameters()))) == [
        "optimizer.param_groups[0].params"
    ]
    named = Contract(optimizer=adam([("a", one.weight), ("b", two.weight)]))
    swapped = Contract(optimizer=adam([("b", two.weight), ("a", one.weight)]))
    assert problem(named, swapped) == ["optimizer.param_groups[0].param_names"]
    for other in (Holder(x=1), Holder(state={}, param_groups=[{}]), Holder(state={}, param_groups={})):
        assert problem(Contract(optimizer=other), make(adam)) == ["optimizer"]


def test_moments_of_parameters_in_another_order_are_refused_where_their_shapes_tell():
    def stepped(shapes):
        parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(parameters)
        optimizer.step()
        return Contract(optimizer=optimizer)

    contract = stepped([3, 2])
    before = bits(contract)
    with pytest.raises(CheckpointMismatchError) as refused:
        contract.restore(freeze(stepped([2, 3]).capture(step=1)))
    moments = [f"optimizer.state[{i}].{key}" for i in (0, 1) for key in ("exp_avg", "exp_avg_sq")]
    assert [field.field for field in refused.value.fields] == moments and bits(contract) == before


REORDERED = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "Muon": lambda p: torch.optim.Muon(p, lr=0.1),
    "AdamW": torch.optim.AdamW, "Adafactor": torch.optim.Adafactor, "Adagrad": torch.optim.Adagrad,
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2), "ASGD": torch.optim.ASGD, "Rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("kind", [name for name in REORDERED if hasattr(torch.optim, name)])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("holders", ["one", "two", "compiled", "tied"])
def test_parameters_under_other_numbers_are_refused_by_name_whatever_their_shapes(kind, wide, holders):
    "LBFGS keeps all parameters in one vector, and Adafactor rows and columns: there not even another shape tells."
    def contract_of(order, step=False):
        torch.manual_seed(0)
        layers = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 5 if wide else 3, bias=False)})
        if holders == "tied":
            layers["c"] = layers["a"]
        weights = [layers[name].weight for name in order]
        optimizer = REORDERED[kind](weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        if step:
            optimizer.step(lambda: weights[0].square().sum())
        held = {"model": torch.compile(layers) if holders == "compiled" else layers}
        if holders == "two":
            held = {"first": layers["a"], "second": layers["b"]}
        return Contract(**held, optimizer=optimizer)

    saved = freeze(contract_of("ab", step=True).capture(step=1))
    contract_of("ab").restore(saved)
    other = contract_of("ba")
    before = bits(other)
    with pytest.raises(CheckpointMismatchError) as refused:
        other.restore(saved)
    fields = [change.field for change in refused.value.fields]
    assert fields and all(field.startswith(("optimizer.parameters.", "optimizer.state[")) for field in fields)
    assert bits(other) == before
    other.restore(saved, only=[name for name in other.participants if name != "optimizer"])
    with pytest.raises(CheckpointMismatchError):
        other.restore(saved, only="optimizer")


@pytest.mark.parametrize("one_module", [True, False])
@pytest.mark.parametrize("two_optimizers", [True, False])
def test_the_moments_of_another_layer_of_the_same_shape_are_refused(one_module, two_optimizers):
    def run(first):
        layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        optimizers = {"a": torch.optim.SGD(layers[first].parameters(), lr=0.1, momentum=0.9)}
        if two_optimizers:
            optimizers["b"] = torch.optim.SGD(layers[1 - first].parameters(), lr=0.1, momentum=0.9)
        layers[1](layers[0](torch.ones(1, 3))).sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()
        modules = {"layers": layers} if one_module else {"first": layers[0], "second": layers[1]}
        return Contract(**modules, **optimizers)

    saved, here = freeze(run(0).capture(step=1)), run(1)
    run(0).restore(saved)
    before = bits(here)
    there = r"layers\.0\.weight, here layers\.1" if one_module else r"first\.weight, here second\."
    with pytest.raises(CheckpointMismatchError, match=rf"a\.parameters\[0\]: checkpoint {there}") as refused:
        here.restore(saved)
    assert bits(here) == before and len(refused.value.fields) == (4 if two_optimizers else 2)


@pytest.mark.parametrize("inside", [False, True])
def test_moments_go_to_a_layer_of_another_name_where_only_they_are_taken_over(inside):
    def run(name):
        layer = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return Contract(**{"model": nn.ModuleDict({name: layer})} if inside else {name: layer}, optimizer=optimizer)

    direct, here = run("layer"), run("other")
    here.restore(freeze(direct.capture(step=1)), only="optimizer")
    moments = [[raw(state["momentum_buffer"]) for state in contract.participants["optimizer"].state.values()]
               for contract in (direct, here)]
    assert moments[0] == moments[1]


@pytest.mark.parametrize("key, value", [("base_lrs", 5), ("base_lrs", "x"), ("_schedulers", [1]), ("_schedulers", 3)])
def test_a_schedule_of_values_that_torch_never_wrote_is_refused_before_anything_changes(key, value):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    rates = torch.optim.lr_scheduler
    schedule = rates.StepLR(optimizer, 2) if key == "base_lrs" else rates.ChainedScheduler([rates.StepLR(optimizer, 2)])
    saved = freeze(Contract(schedule=schedule).capture(step=0))
    saved.tree["schedule"][key] = value
    with pytest.raises(CheckpointMismatchError, match=rf"schedule\.{key}: checkpoint"):
        Contract(schedule=schedule).restore(saved)


def test_the_numbers_of_parameters_do_not_depend_on_the_order_or_the_number_of_the_modules_that_take_part():
    def contract_of(*names):
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        parts = {"model": model, "a": model["a"], "optimizer": torch.optim.AdamW(model.parameters())}
        return Contract(**{name: parts[name] for name in names})

    saved = freeze(contract_of("model", "a", "optimizer").capture(step=0))
    contract_of("optimizer", "a", "model").restore(saved)
    contract_of("optimizer").restore(saved, only="optimizer")
    contract_of("optimizer", "model").restore(saved, only=["model", "optimizer"])
    assert saved.environment["participants"] == {"optimizer": {"class": "AdamW", "parameters": {
        "model.a.weight": 0, "a.weight": 0, "model.a.bias": 1, "a.bias": 1, "model.b.weight": 2, "model.b.bias": 3}}}


@pytest.mark.parametrize("noted", [None, 3, [], {}, {"optimizer": 3}, {"optimizer": {"class": None, "parameters": 3}}])
def test_a_checkpoint_that_tells_nothing_of_its_participants_make_up_is_restored(noted):
    model = nn.Linear(2, 2)
    contract = Contract(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    saved = freeze(contract.capture(step=0))
    contract.restore(replace(saved, environment=saved.environment | {"participants": noted}))


def test_moments_keep_a_dtype_that_is_not_their_parameters():
    class Wide(torch.optim.Optimizer):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].setdefault("sum", torch.full((3,), 1 / 3, dtype=torch.float32)).add_(1e-6)
                self.state[parameter]["count"] = torch.tensor([2**40], dtype=torch.int64)

    def make():
        return Wide([nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))], {})

    original, fresh, used = make(), make(), make()
    original.step()
    saved = freeze(Contract(optimizer=original).capture(step=1))
    used.step()
    used.step()
    for optimizer in (fresh, used):
        contract = Contract(optimizer=optimizer)
        contract.restore(saved)
        assert bits(contract) == bits(Contract(optimizer=original))


def test_a_changed_learning_rate_is_the_schedules_affair_and_comes_back():
    a, b = (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr) for lr in (0.1, 0.3))
    Contract(optimizer=b).restore(freeze(Contract(optimizer=a).capture(step=0)))
    assert b.param_groups[0]["lr"] == 0.1


# Generators

BIT_GENERATORS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]
GENERATORS = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "random.Random": lambda: random.Random(3),
    "RandomState": lambda: np.random.RandomState(3),
    **{name: lambda name=name: np.random.Generator(getattr(np.random, name)(3)) for name in BIT_GENERATORS},
}


def numbers(generator):
    if isinstance(generator, torch.Generator):
        return torch.randn(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(3)]
    return [float(generator.standard_normal()), *map(float, generator.random(2))]


@pytest.mark.parametrize("name", GENERATORS)
def test_every_kind_of_generator_goes_on_where_it_was(name):
    generator, other = GENERATORS[name](), GENERATORS[name]()
    numbers(generator)
    saved = freeze(Contract(g=NamedGenerator(generator)).capture(step=0))
    expected = numbers(generator)
    Contract(g=NamedGenerator(other)).restore(saved)
    assert numbers(other) == expected


def test_a_generator_of_another_kind_is_refused():
    for a in GENERATORS:
        for b in GENERATORS:
            if a != b:
                saved = freeze(Contract(g=NamedGenerator(GENERATORS[a]())).capture(step=0))
                with pytest.raises(ContractError, match="^g: the checkpoint's state does not fit"):
                    Contract(g=NamedGenerator(GENERATORS[b]())).restore(saved)


@given(st.integers(0, 2**63 - 1))
@settings(max_examples=20, deadline=None)
def test_seeding_sets_all_global_generators(seed):
    drawn = []
    for _ in range(2):
        RandomGenerators().seed(seed)
        drawn.append((random.random(), float(np.random.rand()), torch.rand(()).item()))
    assert drawn[0] == drawn[1]


def test_numpys_global_generator_may_be_of_another_kind(monkeypatch):
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        contract = Contract(rng=RandomGenerators())
        saved = freeze(contract.capture(step=0))
        expected = np.random.rand(3).tolist()
        contract.restore(saved)
        assert np.random.rand(3).tolist() == expected
    finally:
        np.random.set_bit_generator(before)
    with pytest.raises(ContractError, match="numpy.bit_generator"):
        contract.restore(saved)


def test_numpy_is_neither_saved_nor_needed_where_it_is_not_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy")
    state = RandomGenerators().state_dict()
    assert set(state) == {"python", "torch_cpu"}
    RandomGenerators().load_state_dict(state)
    assert "numpy" not in sys.modules


def drawn():
    return random.random(), float(np.random.rand()), torch.rand(()).item()


class DrawsWhileLoading(Holder):
    def load_state_dict(self, state):
        drawn()
        super().load_state_dict(state)


def test_restoring_draws_nothing_and_generators_come_last():
    contract = Contract(rng=RandomGenerators(), loader=DrawsWhileLoading(x=1))
    saved = freeze(contract.capture(step=0))
    expected = drawn()
    contract.restore(saved)
    assert drawn() == expected
    RandomGenerators().seed(5)
    contract.restore(saved, only="loader")
    after = drawn()
    RandomGenerators().seed(5)
    assert after == drawn()


def test_the_generators_are_captured_after_a_participant_that_draws():
    class DrawsWhenAsked(Holder):
        def state_dict(self):
            drawn()
            return super().state_dict()

    contract = Contract(rng=RandomGenerators(), loader=DrawsWhenAsked(x=1))
    saved = freeze(contract.capture(step=0))
    expected = drawn()  # what the run goes on with
    contract.restore(saved)
    assert list(saved.tree) == ["rng", "loader"] and drawn() == expected


def test_a_gaussian_kept_back_by_python_and_numpy_survives():
    random.gauss(0, 1)
    np.random.standard_normal()
    saved = freeze(Contract(rng=RandomGenerators()).capture(step=0))
    expected = random.gauss(0, 1), float(np.random.standard_normal())
    RandomGenerators().seed(1)
    Contract(rng=RandomGenerators()).restore(saved)
    assert (random.gauss(0, 1), float(np.random.standard_normal())) == expected


# Plain attributes


def plain(**attributes):
    return SimpleNamespace(**attributes)


def test_plain_attributes_come_back_on_the_same_object_with_their_types():
    values = dict(best=float("inf"), bad=3, seen=[1, 2], by_name={"a": (1, b"x")}, none=None, yes=True,
                  nan=math.nan, big=2**80, zero=-0.0, text="ü")
    watcher = plain(**copy.deepcopy(values))
    saved = freeze(Contract(watcher=PlainState(watcher)).capture(step=0))
    watcher.seen.append(3)
    other = plain(best=1.0, seen=[], other=5)
    Contract(watcher=PlainState(other)).restore(saved)
    # What the checkpoint's run did not have is taken away.
    assert repr(sorted(vars(other).items())) == repr(sorted(values.items()))
    assert watcher.seen == [1, 2, 3]


def test_only_the_named_fields_are_taken_and_they_must_be_the_same_ones():
    watcher = plain(best=1.0, bad=0, model=nn.Linear(1, 1))
    contract = Contract(watcher=PlainState(watcher, fields=("best", "bad")))
    saved = freeze(contract.capture(step=0))
    watcher.best, watcher.bad, model = 5.0, 7, watcher.model
    contract.restore(saved)
    assert (watcher.best, watcher.bad) == (1.0, 0) and watcher.model is model
    with pytest.raises(ContractError, match="watcher: .*expected the fields best, the checkpoint has best, bad"):
        Contract(watcher=PlainState(watcher, fields="best")).restore(saved)


class Slotted:
    __slots__ = ("best",)

    def __init__(self):
        self.best = 1.0


class Guarded:
    @property
    def best(self):
        return 1.0


FrozenPoint = namedtuple("FrozenPoint", "best")


@dataclass(frozen=True)
class Frozen:
    best: float = 1.0


class Refusing:
    def __init__(self):
        vars(self)["best"] = 1.0

    def __setattr__(self, name, value):
        raise ValueError("not today")


@pytest.mark.parametrize(("obj", "fields", "message"), [
    (plain(best=1), (), "at least one field"),
    (plain(best=1), ("best", "bats"), "attribute \"bats\""),
    (Guarded(), "best", "that can be set"),
    (FrozenPoint(1.0), "best", "that can be set"),
    (Frozen(), None, "that can be set"),
    (Frozen(), "best", "that can be set"),
    (FrozenPoint(1.0), None, "its elements are no attributes"),
    (Refusing(), None, "not today"),
    (nn.Linear(1, 1), None, "make it a participant itself"),
    (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), None, "make it a participant itself"),
    (3, None, "no instance attributes"),
], ids=lambda value: value if isinstance(value, str) else type(value).__name__)  # fmt: skip
def test_fields_that_cannot_be_state_are_refused_when_they_are_declared(obj, fields, message):
    with pytest.raises(ContractError, match=message):
        PlainState(obj, fields)


def test_slots_are_taken_by_name():
    slotted, other = Slotted(), Slotted()
    slotted.best = 0.5
    saved = freeze(Contract(watcher=PlainState(slotted, "best")).capture(step=0))
    Contract(watcher=PlainState(other, "best")).restore(saved)
    assert other.best == 0.5


class HalfSlotted(Slotted):
    "Has both: a slot of its base, one of its own under a private name, and attributes beside them."

    __slots__ = ("__dict__", "__private", "unset")

    def __init__(self):
        super().__init__()
        self.__private, self.seen = [], 0

    @property
    def private(self):
        return self.__private


@pytest.mark.parametrize("kind", [Slotted, HalfSlotted])
def test_taken_whole_an_object_keeps_its_slots(kind):
    watcher, other = kind(), kind()
    watcher.best = 0.25
    if kind is HalfSlotted:
        watcher.private.append(7)
        watcher.seen, watcher.late, other.unset = 3, "x", "taken away"
    saved = freeze(Contract(watcher=PlainState(watcher)).capture(step=0))
    Contract(watcher=PlainState(other)).restore(saved)
    assert other.best == 0.25
    if kind is HalfSlotted:
        assert (other.private, other.seen, other.late, hasattr(other, "unset")) == ([7], 3, "x", False)


ONE_LIST, ONE_DICT, ONE_TENSOR = [1], {"a": 1}, torch.ones(2)


@pytest.mark.parametrize(("objects", "message"), [
    ([plain(a=ONE_LIST, b=ONE_LIST)], r"w0\.a and w0\.b are one mutable value"),
    ([plain(a=[ONE_LIST, 2, ONE_LIST])], r"w0\.a\[0\] and w0\.a\[2\] are one mutable value"),
    ([plain(a={"x": (ONE_DICT,)}, b=ONE_DICT)], r"w0\.a\.x\[0\] and w0\.b are one mutable value"),
    ([plain(a=(ONE_LIST,)), plain(b=ONE_LIST)], r"w0\.a\[0\] and w1\.b are one mutable value"),
    ([plain(a=ONE_TENSOR, b=[ONE_TENSOR])], r"w0\.a and w0\.b\[0\] are one mutable value"),
    ([plain(a=ONE_TENSOR[1:], b=[ONE_TENSOR])], r"w0\.a and w0\.b\[0\] are one mutable value"),
    ([plain(a=ONE_TENSOR.view(2, 1), b=ONE_TENSOR.view(torch.int32))], r"w0\.a and w0\.b are one mutable value"),
    ([plain(a=ONE_TENSOR, b=ONE_TENSOR.view(2))], r"w0\.a and w0\.b are one mutable value"),
], ids=str)  # fmt: skip
def test_one_mutable_value_under_two_names_is_refused_when_it_is_saved(objects, message):
    contract = Contract(**{f"w{number}": PlainState(obj) for number, obj in enumerate(objects)})
    with pytest.raises(ContractError, match=message):
        contract.capture(step=0)
    for obj in objects:
        obj.a = [[1], 2, [1]]  # equal, and not the same
    contract.capture(step=0)


@pytest.mark.parametrize("share", ["buffer", "state_dict", "moment", "view", "chunks", "copy", "holder's"])
def test_memory_of_another_participant_in_a_plain_attribute_is_refused(share):
    model = nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    holder = Holder(mean=torch.ones(4))
    value, name = {
        "buffer": (model.running_mean, "model.running_mean"),
        "state_dict": (dict(model.state_dict()), "model.weight"),
        "moment": (optimizer.state[model.bias]["momentum_buffer"], r"optimizer.state\[1\].momentum_buffer"),
        "view": ([model.running_var[1:3].view(2, 1)], "model.running_var"),
        "chunks": (torch.arange(4.0).chunk(2), None),
        "copy": (copy.deepcopy(model.state_dict()), None),
        "holder's": (holder.state["mean"], "holder.mean"),
    }[share]
    contract = Contract(watcher=PlainState(plain(best=value)), model=model, optimizer=optimizer, holder=holder)
    if name is None:
        contract.restore(freeze(contract.capture(step=0)))
        return
    with pytest.raises(ContractError, match=rf"watcher\.best\S* and {name} are one mutable value, of which a restore"):
        contract.capture(step=0)


class Computes:
    "Gives a new list each time it is asked."

    @property
    def seen(self):
        return [1, 2]

    @seen.setter
    def seen(self, value):
        pass


def test_lists_that_are_made_when_they_are_asked_for_are_not_taken_for_one():
    objects = {f"w{number}": PlainState(Computes(), "seen") for number in range(20)}
    for part in objects.values():
        part.obj.left_out = [[] for _ in range(3)]
    assert Contract(**objects).capture(step=0).tree["w19"] == {"seen": [1, 2]}


class Base:
    table = {"a": [1, 2]}
    limits = torch.zeros(2)


class InItsClass(Base):
    seen, names, count, newest, words = [], {"x"}, 0, deque(), bytearray(b"a")
    array = np.zeros(2)
    helper = object()

    def __init__(self):
        self.own = 1


CLASS_CHANGES = {
    "seen": lambda o: o.seen.append(1),
    "names": lambda o: o.names.add("y"),
    "count": lambda o: setattr(type(o), "count", 1),
    "newest": lambda o: o.newest.append(2),
    "words": lambda o: o.words.extend(b"b"),
    "array": lambda o: o.array.__setitem__(0, 1),
    "limits": lambda o: o.limits.add_(1),
    "table": lambda o: o.table["a"].append(3),
    "later": lambda o: setattr(type(o), "later", [1]),
    "helper": lambda o: setattr(type(o), "helper", object()),
}


@pytest.mark.parametrize("name", CLASS_CHANGES)
def test_state_in_the_class_of_an_object_that_is_taken_whole_is_refused_when_it_moves(name):
    def fresh(cls, *bases):
        return type(cls.__name__, bases, {k: copy.deepcopy(v) for k, v in vars(cls).items() if k[:8] not in (
            "__dict__", "__weakre")})

    obj = fresh(InItsClass, fresh(Base, object))()
    contract = Contract(obj=PlainState(obj))
    assert contract.capture(step=0).tree == {"obj": {"own": 1}}
    CLASS_CHANGES[name](obj)
    with pytest.raises(ContractError, match=f"obj: {name} has changed, and belongs to the class InItsClass"):
        contract.capture(step=0)
    setattr(obj, name, 5)  # from here on it is the object's own
    assert contract.capture(step=0).tree["obj"] == {"own": 1, name: 5}


def test_a_class_that_is_not_taken_whole_may_change():
    obj = type("Counting", (), {"total": 0, "seen": [], "__init__": lambda self: setattr(self, "own", 1)})()
    contract = Contract(obj=PlainState(obj, fields="own"))
    type(obj).total = 3
    obj.seen.append(1)
    assert contract.capture(step=0).tree == {"obj": {"own": 1}}


def test_a_field_that_is_the_same_list_as_one_that_is_left_out_is_refused():
    watcher = plain(seen=[1], alias=None, short=(1, 2), other=(1, 2))
    watcher.alias = watcher.seen
    with pytest.raises(ContractError, match=r"w\.seen and w\.alias are one mutable value"):
        Contract(w=PlainState(watcher, "seen")).capture(step=0)
    watcher.alias = list(watcher.seen)
    watcher.other = watcher.short  # what cannot change may have as many names as it likes
    Contract(w=PlainState(watcher)).capture(step=0)


@pytest.mark.parametrize(("value", "message"), [
    (np.float64(0.5), r"watcher.best is a numpy.float64: store x.item\(\)"),
    ({1, 2}, "watcher.best is a set"),
    ([{"x": len}], r"watcher.best\[0\].x is a builtin_function_or_method: code is no state"),
    (nn.Parameter(torch.ones(2)), "watcher: best is a tensor that requires a gradient"),
    ([torch.ones(2, requires_grad=True)], r"watcher: best\[0\] is a tensor that requires a gradient"),
], ids=str)  # fmt: skip
def test_a_field_that_cannot_come_back_is_named_when_it_is_saved(value, message):
    with pytest.raises(ContractError, match=message):
        Contract(watcher=PlainState(plain(best=value))).capture(step=0)


def test_a_tensor_in_a_field_is_filled_in_place_and_a_loss_may_have_a_graph():
    watcher = plain(best=torch.ones(3), loss=(torch.ones(1, requires_grad=True) * 2).sum())
    contract = Contract(watcher=PlainState(watcher))
    saved, best = freeze(contract.capture(step=0)), watcher.best
    best.fill_(9.0)
    contract.restore(saved)
    assert watcher.best is best and best.eq(1).all() and watcher.loss.item() == 2.0


# Gradients between micro-batches


def accumulating(every=4, save=True):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    accumulation = Accumulation(model, every=every, save=save)
    return model, optimizer, accumulation, Contract(model=model, optimizer=optimizer, accumulation=accumulation)


def accumulate(first, last, model, optimizer, accumulation, _, to_none=True):
    for number in range(first, last):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(number))
        (model(x).square().mean() / 4).backward()
        if accumulation.add():
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("stop", range(9))
def test_a_stop_between_micro_batches_loses_nothing(stop, to_none):
    direct = accumulating()
    accumulate(0, stop, *direct, to_none=to_none)
    saved = freeze(direct[3].capture(step=stop))
    accumulate(stop, 12, *direct, to_none=to_none)
    for before in (0, 2, 4):  # into a new run, one in the middle of an update, and one after it
        resumed = accumulating()
        accumulate(0, before, *resumed)
        resumed[3].restore(saved)
        accumulate(stop, 12, *resumed, to_none=to_none)
        assert bits(resumed[3]) == bits(direct[3])


def test_gradients_of_a_restored_accumulation_are_the_same_tensors_where_they_fit():
    run = accumulating()
    accumulate(0, 2, *run)
    saved = freeze(run[3].capture(step=2))
    gradient = run[0][0].weight.grad
    accumulate(2, 3, *run)
    run[3].restore(saved)
    assert run[0][0].weight.grad is gradient and run[2].done == 2
    fresh = accumulating()
    fresh[3].restore(saved)
    assert torch.equal(fresh[0][0].weight.grad, gradient) and fresh[0][0].weight.grad is not gradient


@pytest.mark.parametrize("moment", ["refused in the middle", "not counted", "before the update", "after the update"])
def test_gradients_that_a_checkpoint_would_lose_are_refused(moment):
    model, optimizer, accumulation, contract = accumulating(save=moment != "refused in the middle")
    backward = lambda: model(torch.ones(1, 3)).sum().backward()  # noqa: E731
    backward()
    if moment == "refused in the middle":
        accumulation.add()
        expected = "accumulation: 1 of 4 micro-batches are in, and their gradients would be lost: capture"
    else:
        expected = r"accumulation: no micro-batch is counted, but 0.weight, 0.bias, 2.weight, ... have gradients"
    if moment in ("before the update", "after the update"):
        for _ in range(4):
            accumulation.add()
    if moment == "after the update":
        optimizer.step()
    with pytest.raises(ContractError, match=expected):
        contract.capture(step=1)
    optimizer.zero_grad(set_to_none=moment != "after the update")
    accumulation.done = 0
    contract.capture(step=1)  # and nothing was changed by asking


@pytest.mark.parametrize("covered", [False, True])
@pytest.mark.parametrize("takes_part", [False, True])
def test_gradients_of_a_module_that_no_accumulation_was_given_are_refused(covered, takes_part):
    encoder, head = nn.Linear(3, 4), nn.Linear(4, 1)
    first = torch.optim.SGD(encoder.parameters(), lr=0.1)
    second = torch.optim.SGD(head.parameters(), lr=0.1)
    parts = {"encoder": encoder, "first": first, "second": second, "accumulation": Accumulation(encoder, every=4)}
    parts |= {"head": head} if takes_part else {}
    parts |= {"of_head": Accumulation(head, every=4)} if covered else {}
    contract = Contract(**parts)
    contract.capture(step=0)
    head(encoder(torch.ones(1, 3))).sum().backward()
    for accumulation in (parts["accumulation"], parts.get("of_head", parts["accumulation"])):
        accumulation.done = 1
    if covered:
        assert freeze(contract.capture(step=1)).tree["of_head"]["gradients"].keys() == {"weight", "bias"}
        return
    stray = "head.weight, head.bias" if takes_part else "parameter 0 of second, parameter 1 of second"
    with pytest.raises(ContractError, match=f"update is unfinished, and the gradients of {stray} would be lost"):
        contract.capture(step=1)
    second.zero_grad(set_to_none=False)
    contract.capture(step=1)  # a gradient of zeros is none


class Loader(Holder):
    "As torchdata's loader: a number of workers, and a state that is for it."

    def __init__(self, num_workers):
        self.num_workers = num_workers
        snapshot = {"_main_snapshot": {"_num_workers": num_workers}, "_worker_snapshots": {}}
        super().__init__(**({"_snapshot": snapshot} if num_workers else {"_num_yielded": 3, "_index": 3}))


@pytest.mark.parametrize("loader", ["own", "torchdata"])
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1), (2, 2), (0, 0)])
@pytest.mark.parametrize("ended", [False, True])
def test_the_state_of_a_loader_with_another_number_of_workers_is_refused(loader, before, after, ended):
    def build(workers):
        if loader == "own":
            return Loader(workers)
        torchdata = pytest.importorskip("torchdata.stateful_dataloader")
        return torchdata.StatefulDataLoader(range(8), batch_size=2, num_workers=workers)

    first, second = build(before), build(after)
    if loader == "torchdata":
        batches = iter(first)
        next(batches)
        if ended:
            list(batches)
    saved = freeze(Contract(loader=first).capture(step=0))
    contract = Contract(loader=second)
    if before == after:
        contract.restore(saved)
        return
    message = f"loader.num_workers: checkpoint {before}, here {after}; build the participants as"
    for call in (contract.check, contract.restore):
        with pytest.raises(CheckpointMismatchError, match=message):
            call(saved)


@pytest.mark.parametrize(("change", "message"), [
    ({"every": 2}, "expected 4 micro-batches to an update, the checkpoint has 2"),
    ({"done": 4}, "expected a count below 4"), ({"done": -1}, "expected a count below 4"),
    ({"done": True}, "expected a count below 4"), ({"gradients": None}, "expected a count below 4"),
    ({"gradients": {"9.weight": torch.ones(1)}}, "gradients.9.weight: expected null, the checkpoint has float32"),
    ({"gradients": {"0.bias": torch.ones(5)}}, r"gradients.0.bias: expected float32 \(4,\), the checkpoint has"),
    ({"gradients": {"0.bias": torch.ones(4).double()}}, "the checkpoint has float64"),
    ({"gradients": {"0.bias": 1.0}}, "the checkpoint has 1.0"),
], ids=str)  # fmt: skip
def test_the_gradients_of_another_accumulation_are_refused_before_anything_changes(change, message):
    run = accumulating()
    accumulate(0, 3, *run)
    saved = freeze(run[3].capture(step=3))
    before = bits(run[3])
    holder = Contract(accumulation=Holder(**run[2].state_dict() | change))
    changed = freeze(holder.capture(step=3)).tree["accumulation"]
    with pytest.raises(ContractError, match=message):
        run[3].restore(replace(saved, tree=saved.tree | {"accumulation": changed}))
    assert bits(run[3]) == before


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs a torch with gradients of another dtype")
@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_gradients_of_a_dtype_of_their_own_come_back(dtype):
    def run(n):
        model = nn.Linear(3, 1).bfloat16()
        with torch.no_grad():
            model.weight.fill_(0.5)
        for parameter in model.parameters():
            parameter.grad_dtype = dtype
        accumulation = Accumulation(model, every=4)
        for i in range(n):
            model.weight.grad = torch.full((1, 3), 1 / 3 + i) + (0 if model.weight.grad is None else model.weight.grad)
            accumulation.add()
        return model, accumulation

    model, accumulation = run(2)
    saved = freeze(Contract(model=model, accumulation=accumulation).capture(step=0))
    for n in (0, 3):
        other, there = run(n)
        Contract(model=other, accumulation=there).restore(saved)
        assert raw(other.weight.grad) == raw(model.weight.grad) and other.weight.grad.dtype == torch.float32
    plain = nn.Linear(3, 1).bfloat16()
    with pytest.raises(ContractError, match=r"gradients\.weight: expected bfloat16 \(1, 3\), the checkpoint has f"):
        Contract(model=plain, accumulation=Accumulation(plain, every=4)).restore(saved)


def test_unfinished_gradients_are_put_back_when_another_participant_fails():
    def contract_with(run, value):
        return Contract(**run[3].participants, fragile=Fragile(tensor=torch.ones(2), value=value))

    other = accumulating()
    bad = freeze(contract_with(other, "key").capture(step=0))
    run = accumulating()
    accumulate(0, 3, *run)
    contract = contract_with(run, "good")
    before = bits(contract)
    with pytest.raises(ContractError, match="every participant is as it was before"):
        contract.restore(bad)
    assert bits(contract) == before and run[2].done == 3


def test_frozen_parameters_sparse_gradients_and_wrong_numbers():
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    model[1].requires_grad_(False)
    accumulation = Accumulation(model, every=2)
    model(torch.tensor([1])).sum().backward()
    accumulation.add()
    with pytest.raises(ContractError, match=r"accumulation.gradients.0.weight is a sparse tensor .*to_dense"):
        Contract(accumulation=accumulation).capture(step=0)
    for every in (0, -1, 2.0, True):
        with pytest.raises(ContractError, match="every: expected a number of micro-batches"):
            Accumulation(model, every=every)


# Flags


def test_flags_of_modules_and_parameters_come_back():
    def build():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        model[0].requires_grad_(False)
        return model, Contract(model=model, flags=ModuleFlags(model))

    model, contract = build()
    model[0].weight.requires_grad_(True)
    model[1].eval()
    other, resumed = build()
    resumed.restore(freeze(contract.capture(step=0)))
    assert [p.requires_grad for p in other.parameters()] == [True, False, True, True]
    assert [module.training for module in other.modules()] == [True, True, False, True]
    with pytest.raises(ContractError, match="flags: .*requires_grad: expected a flag for each of"):
        Contract(flags=ModuleFlags(nn.Linear(2, 2))).restore(freeze(Contract(flags=ModuleFlags(model)).capture(step=0)))


def test_flags_of_a_compiled_module_have_the_names_of_the_module():
    model = nn.Linear(2, 2)
    flags = ModuleFlags(torch.compile(model, backend="eager")).state_dict()
    assert flags == ModuleFlags(model).state_dict() and list(flags["requires_grad"]) == ["weight", "bias"]


@pytest.mark.parametrize("error", [ValueError, KeyError, ContractError])
def test_a_participant_may_refuse_the_moment_and_is_named(error):
    class Busy(Holder):
        def validate_capture(self):
            raise error("in the middle of something")

    contract = Contract(busy=Busy(x=1))
    with pytest.raises(ContractError, match="busy: .*in the middle of something"):
        contract.capture(step=0)
    contract.restore(freeze(Contract(busy=Holder(x=2)).capture(step=0)))  # only saving is refused
    assert contract.participants["busy"].state == {"x": 2}


# Progress


def test_a_long_history_grows_and_comes_back():
    progress = Progress()
    for step in range(1000):
        progress.record(step / 7, 3, step.to_bytes(2, "big"))
        if step == 99:
            early = Contract(progress=progress).capture()
    assert early.step == 100 and early.tokens_seen == 300 and len(early.tree["progress"]["losses"]) == 100
    saved = freeze(Contract(progress=progress).capture())
    other = Progress()
    Contract(progress=other).restore(saved)
    for p in (progress, other):
        p.record(math.nan, 3, b"last")
    assert raw(other.losses) == raw(progress.losses) and other.losses[998] == 998 / 7
    assert other.batch_digest == progress.batch_digest and (other.step, other.tokens_seen) == (1001, 3003)


def test_a_batch_in_another_order_has_another_digest():
    a, b = Progress(), Progress()
    for p, batches in ((a, (b"1", b"2")), (b, (b"2", b"1"))):
        for batch in batches:
            p.record(0.0, 1, batch)
    assert a.batch_digest != b.batch_digest


@pytest.mark.parametrize(
    "change",
    [{"step": "3"}, {"step": True}, {"losses": torch.zeros(2)}, {"losses": torch.zeros(3)}, {"batch_digest": None}],
)
def test_progress_that_is_none_is_refused_before_anything_changes(change):
    progress = Progress()
    for _ in range(2):
        progress.record(1.0, 1)
    saved = freeze(Contract(progress=progress).capture())
    with pytest.raises(ContractError, match="progress: the checkpoint's state does not fit: expected"):
        Contract(progress=progress).check(
            replace(saved, tree={"progress": saved.tree["progress"] | state_tree(change)})
        )


def test_the_step_comes_from_progress_and_must_agree_with_it():
    progress = Progress()
    progress.record(1.0, 1)
    contract = Contract(progress=progress)
    assert contract.capture().step == contract.capture(step=1).step == 1
    with pytest.raises(ContractError, match="expected 1, which progress has counted, got 2"):
        contract.capture(step=2)
    without = Contract(model=nn.Linear(1, 1))
    for wrong in (-1, 1.0, True, "1"):
        with pytest.raises(ContractError, match="step: expected a number of completed steps"):
            without.capture(step=wrong)
    with pytest.raises(ContractError, match=r"give capture\(step=...\), or let a Progress take part"):
        without.capture()


def test_the_counted_step_is_read_without_capturing_anything():
    class Unreadable(Holder):
        def state_dict(self):
            raise AssertionError("the step alone was asked for")

    progress, counter = Progress(), SimpleNamespace(step=5, state_dict=dict, load_state_dict=dict)
    contract = Contract(model=nn.Linear(1, 1), costly=Unreadable(), history=progress)
    begun = contract.lineage
    assert contract.step == 0
    progress.record(1.0, 1)
    assert contract.step == 1 and contract.lineage == begun
    assert Contract(progress=counter).step == 5  # one's own counter, by its name
    assert Contract(counter=counter).step is None
    assert Contract(model=nn.Linear(1, 1)).step is None
    with pytest.raises(AttributeError):
        contract.step = 3


# Participants


@pytest.mark.parametrize(
    ("participants", "message"),
    [
        ({}, "expected at least one participant"),
        ({"x": 3}, "x: expected an object with state_dict"),
        ({"x": torch.Generator()}, "NamedGenerator"),
        ({"x": np.random.default_rng(0)}, "NamedGenerator"),
        ({"x": random.Random(0)}, "NamedGenerator"),
        ({"x": torch.ones(2)}, "make it a buffer"),
        ({"x": nn.Linear}, "give an instance, not the class"),
        ({"a.b": Holder()}, "expected a participant's name to be an identifier"),
    ],
)
def test_what_cannot_take_part_is_refused_at_once(participants, message):
    with pytest.raises(ContractError, match=message):
        Contract(**participants)


class Anchored(nn.Module):
    "A module whose state has a meaning only together with something that is not saved."

    def __init__(self, base, anchored=True):
        super().__init__()
        self.weight, self.base, self.asked, self.anchored = nn.Parameter(torch.zeros(2)), base, 0, anchored

    def identity(self):
        return {"base": self.base}

    def validate_state_dict(self, state):
        self.asked += 1
        if not self.anchored:
            raise ValueError("expected an anchor, got none")


def test_a_participant_may_have_an_identity_and_a_module_may_refuse_a_state():
    saved = freeze(Contract(part=Anchored("one")).capture(step=0))
    assert saved.identity == {"part": {"base": "one"}} == saved.description
    same = Anchored("one")
    Contract(part=same).restore(saved)
    assert same.asked == 1
    with pytest.raises(CheckpointMismatchError) as refused:
        Contract(part=Anchored("two")).restore(saved)
    assert [str(change) for change in refused.value.fields] == ['part.base: checkpoint "one", requested "two"']
    other = Contract(part=Anchored("two"))
    other.restore(saved, only="part")
    assert other.lineage[-1].accepted_changes[0]["field"] == "part.base"
    with pytest.raises(ContractError, match="part: the checkpoint's state does not fit: expected an anchor, got none"):
        Contract(part=Anchored("one", anchored=False)).restore(saved)
    assert Contract(identity={"part": 3}, part=Anchored("one")).identity() == {"part": 3}  # what is given stands


class IdentityLayer(nn.Module):
    "A module with a layer of that name has no identity of its own."

    def __init__(self):
        super().__init__()
        self.identity = nn.Identity()


def test_a_layer_that_is_called_identity_is_none():
    assert Contract(model=IdentityLayer()).identity() == {}


def test_one_object_has_one_name():
    model = nn.Linear(1, 1)
    with pytest.raises(ContractError, match="a and b are the same object"):
        Contract(a=model, b=model)


def test_a_state_dict_that_fails_or_is_no_dict_is_named():
    class Fails(Holder):
        def state_dict(self):
            raise RuntimeError("no")

    class Listed(Holder):
        def state_dict(self):
            return [1]

    with pytest.raises(ContractError, match=r"x: state_dict\(\) raised RuntimeError: no"):
        Contract(x=Fails()).capture(step=0)
    with pytest.raises(ContractError, match=r"x: expected state_dict\(\) to return a dict, got a list"):
        Contract(x=Listed()).capture(step=0)


def test_names_are_compared_and_only_and_allow_missing_are_explicit():
    saved = freeze(Contract(a=Holder(v=1), b=Holder(v=2)).capture(step=7))
    a, c = Holder(v=0), Holder(v=0)
    with pytest.raises(ContractError, match=r"it has b, which nothing here takes"):
        Contract(a=a).restore(saved)
    both = r"lacks c \(allow_missing=\['c'\] keeps .*it has b, which nothing here takes"
    with pytest.raises(ContractError, match=both):
        Contract(a=a, c=c).restore(saved)
    with pytest.raises(ContractError, match="no participant is named z"):
        Contract(a=a).restore(saved, only="z")
    with pytest.raises(ContractError, match="only=: expected at least one"):
        Contract(a=a, b=Holder()).restore(saved, only=[])
    with pytest.raises(ContractError, match="lacks c"):
        Contract(a=a, c=c).restore(saved, only=["a", "c"])
    assert (a.state, c.state) == ({"v": 0}, {"v": 0})
    contract = Contract(a=a, c=c)
    contract.restore(saved, only=["a", "c"], allow_missing="c")
    assert (a.state, c.state) == ({"v": 1}, {"v": 0})
    assert {change["field"] for change in contract.lineage[-1].accepted_changes} == {"b", "c"}


def test_a_snapshot_must_be_frozen_before_it_is_restored():
    contract = Contract(a=Holder(v=1))
    with pytest.raises(ContractError, match=r"freeze\(snapshot\)"):
        contract.restore(contract.capture(step=0))


# Identity


class Config:
    def __init__(self, **values):
        self.values = values

    def identity(self):
        return self.values

    def describe(self):
        return self.values | {"note": "not compared"}


def test_identity_drift_lists_each_field_with_both_values_and_changes_nothing():
    holder = Holder(v=0)
    identity = {"config": Config(lr=0.1, layers=[1, 2], flag=True), "data": {"digest": "abc"}}
    saved = freeze(Contract(identity=identity, a=Holder(v=1)).capture(step=0))
    assert saved.description["config"]["note"] == "not compared" and "note" not in saved.identity["config"]
    other = {"config": Config(lr=0.2, layers=[1, 3], flag=1), "data": {}}
    with pytest.raises(CheckpointMismatchError) as refused:
        Contract(identity=other, a=holder).restore(saved)
    fields = ["config.lr", "config.layers", "config.flag", "data.digest"]
    assert [field.field for field in refused.value.fields] == fields
    assert "config.lr: checkpoint 0.1, requested 0.2" in str(refused.value) and holder.state == {"v": 0}
    Contract(identity=identity, a=holder).restore(saved)
    assert holder.state == {"v": 1}


def test_an_identity_that_is_not_plain_is_refused_when_the_contract_is_made():
    with pytest.raises(ContractError, match=r"identity\['config'\]: layers\[0\]"):
        Contract(identity={"config": {"layers": [{1}]}}, a=Holder())


def test_the_identity_is_read_once():
    values = {"lr": 0.1}
    contract = Contract(identity={"config": values}, a=Holder(v=1))
    values["lr"] = 0.5
    assert contract.identity() == {"config": {"lr": 0.1}}


# Environment


def changed_facts(change, *participants):
    before = environment_identity(participants)["decides"]
    change()
    after = environment_identity(participants)["decides"]
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda: torch.set_num_threads(2), "threads"),
        (lambda: torch.use_deterministic_algorithms(True), "deterministic_algorithms"),
        (lambda: torch.set_default_dtype(torch.float64), "default_dtype"),
        (lambda: torch.backends.cuda.enable_flash_sdp(False), "sdpa"),
        (lambda: torch.backends.cuda.enable_math_sdp(False), "sdpa"),
        (lambda: torch.backends.mkldnn.set_flags(False), "onednn"),
    ],
)
def test_each_switch_is_a_fact(change, fact):
    try:
        assert changed_facts(change) == {fact}
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.cuda.enable_math_sdp(True)
        torch.backends.mkldnn.set_flags(True)


def test_precision_is_a_fact_and_going_back_leaves_no_trace():
    changed = changed_facts(lambda: torch.set_float32_matmul_precision("medium"))
    assert changed == {"onednn", "float32_matmul_precision"}
    torch.set_float32_matmul_precision("highest")
    first = environment_identity()
    torch.set_float32_matmul_precision("medium")
    torch.set_float32_matmul_precision("highest")
    assert environment_identity() == first


def test_a_precision_never_set_is_the_one_set_back():
    def backend(value):
        return SimpleNamespace(matmul=SimpleNamespace(fp32_precision=value))

    for never_set_or_set_back in ("none", "ieee"):
        assert chapter._fp32_precision(backend(never_set_or_set_back)) == {"fp32_matmul": "ieee"}
    assert chapter._fp32_precision(backend("tf32")) == {"fp32_matmul": "tf32"}


def test_devices_are_read_from_what_is_there_from_the_start():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for participant in (model, optimizer, Holder(), SimpleNamespace(inner=model)):
        expected = [] if isinstance(participant, Holder) else [model.weight, model.bias]
        assert list(map(id, chapter._lasting_tensors(participant))) == list(map(id, expected))


def test_each_variable_of_the_shell_is_a_fact():
    script = (
        "import json, torch; from fault_tolerant_transformer_lab.contract import environment_identity; "
        "print(json.dumps(environment_identity()['decides']))"
    )
    variables = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2",
                 "MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "1"}  # fmt: skip
    base = {name: value for name, value in os.environ.items() if name not in variables}
    command = [sys.executable, "-c", script]
    outputs = [subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
               for env in (base, base | variables)]  # fmt: skip
    without, with_all = map(json.loads, outputs)
    assert with_all["threads"] == 1 and with_all["MKL_CBWR"] == "COMPATIBLE"
    assert with_all["ONEDNN_MAX_CPU_ISA"] == with_all["MKL_ENABLE_INSTRUCTIONS"] == "AVX2"
    assert with_all["cpu_capability"] == "DEFAULT"
    assert not {"MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"} & without.keys()
    unaffected = {"torch", "torch_build", "python", "architecture", "cpu_instructions", "cpu_vendor"}
    assert {name: with_all[name] for name in unaffected} == {name: without[name] for name in unaffected}


def test_the_environment_does_not_depend_on_how_far_the_run_is():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    before = environment_identity([model, optimizer])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert environment_identity([model, optimizer]) == before and json.loads(json.dumps(before)) == before


def test_cuda_facts_are_absent_on_the_cpu_and_can_be_collected():
    on_cpu = environment_identity([nn.Linear(1, 1)])["decides"]
    assert on_cpu["devices"] == "cpu" and not any(name.startswith(("cuda", "cudnn")) for name in on_cpu)
    facts = chapter._cuda_facts()
    assert {"cuda", "cudnn", "cudnn_deterministic", "cuda_fp32"} <= facts.keys()
    json.dumps(facts)


@pytest.mark.parametrize(("change", "fact"), [
    (lambda patch: patch.setattr(torch.backends.cudnn, "deterministic", True), "cudnn_deterministic"),
    (lambda patch: patch.setattr(torch.backends.cudnn, "benchmark", True), "cudnn_benchmark"),
    (lambda patch: patch.setattr(torch.backends.cudnn, "enabled", False), "cudnn_enabled"),
    (lambda patch: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
     "cuda_reduced_precision"),
    (lambda patch: torch.backends.cuda.enable_cudnn_sdp(False), "cudnn_sdp"),
    (lambda patch: torch.set_float32_matmul_precision("high"), "cuda_fp32"),
    (lambda patch: patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8"), "CUBLAS_WORKSPACE_CONFIG"),
    (lambda patch: patch.setenv("NVIDIA_TF32_OVERRIDE", "0"), "NVIDIA_TF32_OVERRIDE"),
    (lambda patch: patch.setattr(torch.cuda, "device_count", lambda: 7), "cuda_devices"),
])
def test_each_switch_of_cuda_is_a_fact_where_cuda_is_used(change, fact, monkeypatch):
    "Without a GPU: the switches are there, the device is made up."
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))
    monkeypatch.setattr(chapter, "_lasting_tensors", lambda participant: [participant])
    monkeypatch.delenv(fact, raising=False)
    here, other, cpu = (SimpleNamespace(device=torch.device(name)) for name in ("cuda:0", "cuda:1", "cpu"))
    assert environment_identity([cpu, here])["decides"]["devices"] == "cuda: GPU (sm_90)"
    assert environment_identity([other])["decides"]["devices"] == "cuda: GPU (sm_91)"
    try:
        changed = changed_facts(lambda: change(monkeypatch), here)
        assert fact in changed and changed <= {fact, "onednn", "float32_matmul_precision", "cudnn_fp32"}
        assert fact not in environment_identity([cpu])["decides"]  # of no account there
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_the_generator_of_each_cuda_device_is_saved_and_set(monkeypatch):
    "Two devices made up, and asked for as torch asks."
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [each.get_state() for each in generators])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: generators[device].set_state(state))
    contract = Contract(rng=RandomGenerators())
    saved = freeze(contract.capture(step=0))
    expected = list(map(numbers, generators))
    for in_use in (True, False):  # or not yet: a new process restores before its first kernel
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda in_use=in_use: in_use)
        contract.restore(saved)
        assert list(map(numbers, generators)) == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    contract.restore(saved)
    assert numbers(generators[0]) == expected[0] and numbers(generators[1]) != expected[1]


def test_the_environment_is_refused_accepted_and_recorded():
    contract = Contract(a=Holder(v=1))
    saved = freeze(contract.capture(step=4), state_digest="feed")
    torch.set_num_threads(2)
    with pytest.raises(EnvironmentMismatchError) as refused:
        contract.restore(saved)
    assert [field.field for field in refused.value.fields] == ["threads"]
    assert "threads: checkpoint 1, here 2" in str(refused.value)
    assert "allow_environment_change=True (--allow-environment-change)" in str(refused.value)
    accepted = contract.check(saved, allow_environment_change=True)
    assert [str(change) for change in accepted] == ["threads: checkpoint 1, requested 2"]
    contract.restore(saved, allow_environment_change=True)
    last = contract.lineage[-1]
    assert (last.start_step, last.parent_digest) == (4, "feed")
    assert last.accepted_changes == [{"field": "threads", "checkpoint": 1, "requested": 2}]
    assert last.environment["decides"]["threads"] == 2


def test_an_environment_that_changes_under_the_running_process_begins_a_segment():
    contract = Contract(a=Holder(v=1))
    assert len(contract.capture(step=3).lineage) == 1
    torch.set_num_threads(2)
    lineage = contract.capture(step=5).lineage
    assert [(s.start_step, s.accepted_changes) for s in lineage[1:]] == [
        (5, [{"field": "threads", "checkpoint": 1, "requested": 2}])
    ]
    assert contract.capture(step=6).lineage == lineage == contract.lineage


def test_a_lineage_grows_by_one_segment_per_resume_and_survives_json():
    contract = Contract(progress=Progress())
    for n in range(3):
        contract.participants["progress"].record(1.0, 1)
        contract.restore(freeze(contract.capture(), state_digest=f"digest {n}"))
    assert [(s.start_step, s.parent_digest) for s in contract.lineage] == [
        (0, None), (1, "digest 0"), (2, "digest 1"), (3, "digest 2"),
    ]  # fmt: skip
    through_json = [Segment.from_plain(json.loads(json.dumps(s.to_plain()))) for s in contract.lineage]
    assert through_json == list(contract.lineage)


def test_recorded_facts_are_not_compared():
    contract = Contract(a=Holder(v=1))
    saved = freeze(contract.capture(step=0))
    elsewhere = saved.environment | {"recorded": {"host": "another"}}
    contract.restore(replace(saved, environment=elsewhere))
    assert contract.lineage[-1].accepted_changes == []


# All or none


class Fragile(Holder):
    "Changes its tensor and its value, draws, and fails where the state says so."

    def load_state_dict(self, state):
        self.state["tensor"].copy_(state["tensor"])
        self.state["value"] = state["value"]
        drawn()
        if state["value"] in KINDS:
            raise KINDS[state["value"]]("half-way")


KINDS = {"key": KeyError, "interrupt": KeyboardInterrupt, "exit": SystemExit, "checkpoint": ContractError}


def run_with_fragile(position, value, kind=Fragile):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    parts = [
        ("model", model), ("optimizer", optimizer), ("scheduler", S.StepLR(optimizer, 1)), ("progress", Progress()),
        ("holder", Holder(t=torch.randn(3), v=random.random())), ("rng", RandomGenerators()),
    ]  # fmt: skip
    fragile = ("fragile", kind(tensor=torch.randn(2), value=value))
    return Contract(**dict([*parts[:position], fragile, *parts[position:]]))


@pytest.mark.parametrize("position", range(7))
@pytest.mark.parametrize("failure", KINDS)
def test_a_failure_half_way_leaves_everything_as_it_was_at_every_position(position, failure):
    bad = freeze(run_with_fragile(position, failure).capture())
    contract = run_with_fragile(position, "good")
    lineage, before = contract.lineage, bits(contract)
    address = contract.participants["fragile"].state["tensor"].data_ptr()
    expected = ContractError if failure in ("key", "checkpoint") else KINDS[failure]
    with pytest.raises(expected) as raised:
        contract.restore(bad)
    assert bits(contract) == before and contract.lineage == lineage
    assert contract.participants["fragile"].state["tensor"].data_ptr() == address
    if expected is ContractError:
        assert "fragile: load_state_dict() raised" in str(raised.value)
        assert "every participant is as it was before" in str(raised.value)


def test_a_participant_that_cannot_even_be_put_back_makes_the_contract_unusable():
    class Stubborn(Fragile):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            raise ValueError("always")

    bad = freeze(run_with_fragile(2, "good", Stubborn).capture())
    contract = run_with_fragile(2, "good", Stubborn)
    with pytest.raises(ContractError, match="could not be undone: fragile: load_state_dict.* ValueError: always"):
        contract.restore(bad)
    with pytest.raises(ContractError, match="left a mixture of two states in .*fragile"):
        contract.capture()


class Unreadable(MemoryTensor):
    def load_into(self, out):
        raise OSError(5, "Input/output error")

    load = load_into


def with_unreadable(saved: SavedState, name: str) -> SavedState:
    "The saved state with the last tensor of one participant unreadable."
    *_, (last, _) = [(path, leaf) for path, leaf in walk(saved.tree[name]) if isinstance(leaf, MemoryTensor)]

    def replaced(value, path):
        if path == last:
            return Unreadable(value.data)
        if isinstance(value, dict):
            return type(value)((key, replaced(item, (*path, key))) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(replaced(item, (*path, i)) for i, item in enumerate(value))
        return value

    return replace(saved, tree=saved.tree | {name: replaced(saved.tree[name], ())})


@pytest.mark.parametrize("name", ["holder", "fragile", "progress"])
def test_a_read_error_in_a_participant_of_its_own_is_rolled_back_and_keeps_its_kind(name):
    contract, other = run_with_fragile(3, "good"), run_with_fragile(3, "good")
    for each in (contract, other):
        each.participants["progress"].record(1.0, 1)
    before = bits(contract)
    with pytest.raises(OSError, match="Input/output error"):
        contract.restore(with_unreadable(freeze(other.capture()), name))
    assert bits(contract) == before


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_a_read_error_in_the_model_forbids_the_next_save_until_a_restore_succeeds(name):
    contract = run_with_fragile(3, "good")
    saved = freeze(run_with_fragile(3, "good").capture())
    with pytest.raises(OSError, match="Input/output error"):
        contract.restore(with_unreadable(saved, name))
    with pytest.raises(ContractError, match="the last restore failed half-way"):
        contract.capture()
    with pytest.raises(ContractError, match="no participant is named"):
        contract.restore(saved, only="nobody")
    with pytest.raises(ContractError, match="the last restore failed half-way"):
        contract.capture()  # a refused restore mends nothing
    contract.restore(saved, only="rng")
    with pytest.raises(ContractError, match="the last restore failed half-way"):
        contract.capture()  # nor does one that leaves a part of the mixture
    contract.restore(saved)
    assert contract.capture().step == 0


def test_check_says_what_restore_would_and_changes_nothing():
    contract = run_with_fragile(3, "good")
    saved = freeze(run_with_fragile(3, "good").capture())
    before = bits(contract)
    assert contract.check(saved) == [] and bits(contract) == before


# The whole


class OwnModel(nn.Module):
    "Nothing of the lab's: a small convolutional network with a tied layer and a buffer."

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.up, self.drop = nn.Linear(4, 4, bias=False), nn.Dropout(0.2)
        self.down = nn.Linear(4, 4, bias=False)
        self.down.weight = self.up.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return self.down(self.drop(self.up(self.norm(self.first(x)).mean(-1)))).sum(-1)


class OwnRun:
    def __init__(self):
        self.model = OwnModel()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.noise = np.random.default_rng()
        self.contract = Contract(identity={"config": {"lr": 0.02}}, model=self.model, optimizer=self.optimizer,
                                 noise=NamedGenerator(self.noise), rng=RandomGenerators())  # fmt: skip

    def advance(self):
        x = torch.from_numpy(self.noise.standard_normal((4, 1, 6))).float() + random.random()
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


@pytest.mark.parametrize("stop", [0, 1, 3, 5])
def test_a_loop_of_ones_own_continues_bit_for_bit_also_after_two_stops(stop):
    direct = OwnRun()
    before = [direct.advance() for _ in range(stop)]
    saved = freeze(direct.contract.capture(step=stop))
    after = [direct.advance() for _ in range(6)]
    RandomGenerators().seed(77)
    resumed = OwnRun()
    resumed.contract.restore(saved)
    losses = [resumed.advance() for _ in range(3)]
    second = freeze(resumed.contract.capture(step=stop + 3))
    RandomGenerators().seed(78)
    again = OwnRun()
    again.contract.restore(second)
    losses += [again.advance() for _ in range(3)]
    assert losses == after and bits(again.contract) == bits(direct.contract) and len(before) == stop


def test_capturing_does_not_interfere():
    def trained(captures):
        RandomGenerators().seed(11)
        run = OwnRun()
        run.noise.bit_generator.state = np.random.PCG64(1).state
        for step in range(5):
            for _ in range(captures):
                run.contract.capture(step=step)
            run.advance()
        return bits(run.contract)

    assert trained(0) == trained(2)


def test_all_errors_share_one_base():
    kinds = (ContractError, CheckpointMismatchError, EnvironmentMismatchError)
    assert all(issubclass(kind, CheckpointError) for kind in kinds)


OPTIMIZERS = ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SGD", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD",
              "Adafactor"]


@pytest.mark.parametrize("saved_class", OPTIMIZERS)
def test_the_state_of_another_class_of_optimizer_is_refused(saved_class):
    def stepped(name):
        model = torch.nn.Linear(2, 2)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return Contract(model=model, optimizer=optimizer)

    saved = freeze(stepped(saved_class).capture(step=1))
    for name in OPTIMIZERS:
        if name == saved_class:
            stepped(name).restore(saved)
        else:
            with pytest.raises(CheckpointMismatchError, match="optimizer.param_groups"):
                stepped(name).restore(saved)


@pytest.mark.parametrize("limit", ["OMP_THREAD_LIMIT", "OMP_DYNAMIC", "OMP_MAX_ACTIVE_LEVELS"])
def test_what_limits_a_team_of_threads_decides_bits(monkeypatch, limit):
    monkeypatch.delenv(limit, raising=False)
    without = environment_identity()["decides"]
    monkeypatch.setenv(limit, "1")
    assert environment_identity()["decides"] == without | {limit: "1"}


def test_a_generator_state_that_torch_refuses_changes_nothing():
    model = torch.nn.Linear(2, 2)
    contract = Contract(model=model, rng=RandomGenerators())
    saved = freeze(contract.capture(step=1))
    saved.tree["rng"]["torch_cpu"].data.fill_(255)  # of the right shape, and no state of the Mersenne twister
    with torch.no_grad():
        model.weight.fill_(7.0)
    state = torch.get_rng_state()
    with pytest.raises(ContractError, match="rng"):
        contract.restore(saved)
    assert torch.equal(model.weight, torch.full((2, 2), 7.0)) and torch.equal(torch.get_rng_state(), state)
    contract.capture(step=1)


@pytest.mark.parametrize("wrong", [{"tokens_seen": -5}, {"batch_digest": "zz"}], ids=str)
def test_counts_and_digests_that_no_progress_writes_are_refused(wrong):
    progress = Progress()
    state = progress.state_dict() | wrong
    with pytest.raises(ContractError, match="not negative"):
        progress.load_state_dict(state)
    assert progress.tokens_seen == 0 and progress.batch_digest == ""
