"""Adapters: nothing changes before the first update, nothing of the base changes ever, and a resume is bit for bit."""

import copy
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.optim.swa_utils import AveragedModel

from fault_tolerant_transformer_lab import lora
from fault_tolerant_transformer_lab.checkpoint_file import open_checkpoint, read_manifest, verify
from fault_tolerant_transformer_lab.config import ConfigError, ExperimentConfig, load_config, shipped_config
from fault_tolerant_transformer_lab.contract import (
    CheckpointError,
    CheckpointMismatchError,
    Contract,
    ContractError,
    NamedGenerator,
    freeze,
)
from fault_tolerant_transformer_lab.equivalence import Verdict, prove_restart
from fault_tolerant_transformer_lab.lora import (
    AdapterState,
    LoraConfig,
    LoraError,
    LoraLinear,
    TuningInterrupted,
    TuningRun,
    adapt,
    base_digest,
    compare_tuning,
    export_peft,
    gpt2_name,
    import_peft,
    lora_layers,
    merge,
    merged_state,
    n_trainable,
    peft_files,
    target_layers,
    tuning_run,
    unmerge,
)
from fault_tolerant_transformer_lab.model import Transformer, n_parameters
from fault_tolerant_transformer_lab.publication import CheckpointStore, NoCheckpointError
from fault_tolerant_transformer_lab.training import TrainingError, TrainingRun, deterministic, train

SMOKE = load_config(shipped_config("smoke"))
TINY = ExperimentConfig(
    vocab_size=32, block_size=8, d_model=16, n_heads=2, n_layers=1, dropout=0.1, seed=2712, steps=6, batch_size=2,
    learning_rate=3e-3, checkpoint_every=2, weight_decay=0.1, grad_clip=1.0, grad_accumulation=2,
    schedule={"kind": "cosine", "warmup_steps": 2, "horizon": 40, "floor": 0.1},
)
ARTIFACT = Path(__file__).parents[1] / "artifacts" / "tuning-comparison" / "comparison.json"


@pytest.fixture(autouse=True)
def _one_thread():
    with deterministic(threads=1):
        yield


def model_of(config: ExperimentConfig = TINY, seed: int = 5) -> Transformer:
    torch.manual_seed(seed)
    return Transformer.from_config(config)


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in model.state_dict().items()}


def drawn(model: nn.Module, seed: int = 0) -> nn.Module:
    "Adapters that are away from their start."
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            layer.lora_A.normal_(0.0, 0.3, generator=generator)
            layer.lora_B.normal_(0.0, 0.3, generator=generator)
    return model


# Beside the base


def test_counts_of_the_smoke_configuration_are_those_counted_by_hand():
    model = model_of(SMOKE)
    assert (n_trainable(model), n_parameters(model)) == (28_032, 28_032)
    adapt(model, LoraConfig(), seed=0)
    assert (n_trainable(model), n_parameters(model)) == (1_536, 29_568)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_fresh_adapter_changes_no_bit_of_the_logits(training, bf16):
    plain = model_of()
    adapted = copy.deepcopy(plain)
    adapt(adapted, LoraConfig(rank=3, targets=("*",)), seed=1)
    seen = []
    for model in (plain.train(training), adapted.train(training)):
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            seen.append(model(torch.arange(16).reshape(2, 8)).detach().view(torch.int16 if bf16 else torch.int32))
    assert torch.equal(*seen)


def test_adapting_draws_nothing_from_the_global_generators():
    model = model_of()
    before = torch.get_rng_state()
    adapt(model, LoraConfig(), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_adapter_depends_on_seed_and_name_and_on_nothing_else():
    one, all_of_them, reseeded = model_of(), model_of(seed=6), model_of()
    adapt(one, LoraConfig(targets=("*.expand",)), seed=1)
    adapt(all_of_them, LoraConfig(targets=("*",)), seed=1)
    adapt(reseeded, LoraConfig(targets=("*.expand",)), seed=2)
    first, second, third = (model.blocks[0].mlp.expand.lora_A for model in (one, all_of_them, reseeded))
    assert torch.equal(first, second) and not torch.equal(first, third)
    assert not torch.equal(second, all_of_them.blocks[0].attention.qkv.lora_A)


def test_training_changes_adapters_only_and_every_one_of_them():
    run = TuningRun(TINY, LoraConfig(targets=("*",)))
    before = bits(run.model)
    for _ in range(3):
        run.advance()
    after = bits(run.model)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if name.endswith(("lora_A", "lora_B"))} and len(changed) == 10


def test_the_gradient_of_an_adapter_is_that_of_the_whole_weight_seen_through_it():
    "dA = s·BᵀG and dB = s·GAᵀ, where G is the gradient of a dense layer with the merged weight."
    layer = LoraLinear(nn.Linear(5, 4, dtype=torch.float64), rank=2, alpha=3.0, generator=torch.Generator())
    with torch.no_grad():
        layer.lora_B.normal_()
    dense = nn.Linear(5, 4, dtype=torch.float64)
    with torch.no_grad():
        dense.weight.copy_(layer.weight + 1.5 * layer.lora_B @ layer.lora_A)
        dense.bias.copy_(layer.bias)
    x = torch.randn(7, 5, dtype=torch.float64)
    layer(x).square().sum().backward()
    dense(x).square().sum().backward()
    torch.testing.assert_close(layer.lora_A.grad, 1.5 * layer.lora_B.detach().T @ dense.weight.grad)
    torch.testing.assert_close(layer.lora_B.grad, 1.5 * dense.weight.grad @ layer.lora_A.detach().T)


@pytest.mark.parametrize("targets, found", [
    (("*.qkv",), ["blocks.0.attention.qkv"]),
    (("*.projection",), ["blocks.0.attention.projection", "blocks.0.mlp.projection"]),
    (LoraConfig().targets, ["blocks.0.attention.qkv", "blocks.0.attention.projection"]),
    (("head", "*.mlp.expand"), ["blocks.0.mlp.expand", "head"]),
])
def test_patterns_are_matched_against_whole_names(targets, found):
    assert target_layers(model_of(), targets) == found


@pytest.mark.parametrize("targets", [("qkv",), ("*.qkv", "*.nothing"), ("blocks.0.attention",), ("*norm",), ("*.QKV",)])
def test_a_pattern_that_fits_no_linear_layer_is_refused_with_the_model_unchanged(targets):
    model = model_of()
    with pytest.raises(ConfigError, match="targets: expected patterns that fit a linear layer"):
        adapt(model, LoraConfig(targets=targets), seed=0)
    assert not lora_layers(model) and n_trainable(model) == n_parameters(model)


@pytest.mark.parametrize("field, value", [
    ("rank", 0), ("rank", 2**31), ("rank", 2.5), ("rank", True), ("alpha", 0), ("alpha", -1.0), ("alpha", float("nan")),
    ("targets", ()), ("targets", "qkv"), ("targets", ("",)),
])
def test_settings_that_make_no_sense_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=rf"{field}.*: expected") as refused:
        LoraConfig(**{field: value})
    assert field != "rank" or "expected an integer from 1 to 2**31 - 1, got" in str(refused.value)


# Layers that an adapted one cannot stand for


def with_weight_norm(layer: nn.Linear) -> nn.Linear:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return weight_norm(layer)


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def with_(change: Callable[[nn.Linear], object]) -> nn.Module:
    layer = nn.Linear(3, 3)
    change(layer)
    return nn.Sequential(nn.Linear(3, 3), layer)


ODD = {
    "old weight_norm": lambda: with_(with_weight_norm),
    "parametrized": lambda: with_(parametrizations.weight_norm),
    "pruned": lambda: with_(lambda layer: prune.l1_unstructured(layer, "weight", amount=2)),
    "integers": lambda: with_(lambda layer: layer.register_parameter(
        "weight", nn.Parameter(torch.ones(3, 3, dtype=torch.int8), requires_grad=False))),
    "a buffer": lambda: with_(lambda layer: layer.register_buffer("scale", torch.ones(3))),
    "a parameter": lambda: with_(lambda layer: layer.register_parameter("gain", nn.Parameter(torch.ones(3)))),
    "a module": lambda: with_(lambda layer: layer.add_module("then", nn.ReLU())),
    "forward hook": lambda: with_(lambda layer: layer.register_forward_hook(lambda m, i, o: o + 1)),
    "forward pre-hook": lambda: with_(lambda layer: layer.register_forward_pre_hook(lambda m, i: (i[0] + 1,))),
    "backward hook": lambda: with_(lambda layer: layer.register_full_backward_hook(lambda m, i, o: None)),
    "state hook": lambda: with_(lambda layer: layer.register_state_dict_post_hook(lambda m, s, p, d: None)),
    "load hook": lambda: with_(lambda layer: layer.register_load_state_dict_pre_hook(lambda *given: None)),
    "own forward": lambda: with_(lambda layer: setattr(layer, "forward", lambda x: x)),
    "a class of its own": lambda: nn.Sequential(nn.Linear(3, 3), Doubled(3, 3)),
    "no values": lambda: with_(lambda layer: layer.to("meta")),
    "attention": lambda: nn.ModuleList([nn.Linear(8, 8), nn.MultiheadAttention(8, 2)]),
    "the root": lambda: nn.Linear(3, 3),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "encoder": lambda: nn.Sequential(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_layer_that_an_adapted_one_cannot_stand_for_is_refused_with_the_model_unchanged(odd):
    model = ODD[odd]()
    before = {name: (id(tensor), tensor.requires_grad) for name, tensor in model.named_parameters()}
    modules = [id(module) for module in model.modules()]
    with pytest.raises(LoraError, match="expected a (plain linear layer|layer inside|layer that is called)"):
        adapt(model, LoraConfig(rank=1, targets=("*",)), seed=0)
    assert {name: (id(tensor), tensor.requires_grad) for name, tensor in model.named_parameters()} == before
    assert [id(module) for module in model.modules()] == modules


def test_odd_layers_that_are_not_chosen_stay_as_they_are():
    model = ODD["forward hook"]()
    x = torch.ones(2, 3)
    expected = model(x)
    assert adapt(model, LoraConfig(rank=1, targets=("0",)), seed=0) == ["0"]
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("make, targets", [
    (lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), "linear?"),
    (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), "*"),
], ids=["decoder layer", "perceptron"])
def test_training_evaluation_and_merged_mode_agree(make, targets):
    torch.manual_seed(8)
    model = make()
    adapt(model, LoraConfig(rank=2, targets=(targets,)), seed=0)
    base = copy.deepcopy(model)
    drawn(model)
    x = torch.linspace(-1, 1, 48).reshape(2, 3, 8)
    given = (x, x) if isinstance(model, nn.TransformerDecoderLayer) else (x,)
    with torch.no_grad():
        training, evaluation = model.train()(*given), model.eval()(*given)
        merge(model)
        torch.testing.assert_close(evaluation, training, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(*given), training, rtol=1e-5, atol=1e-5)
        assert (base.eval()(*given) - training).abs().max() > 0.1


def test_what_cannot_be_allocated_leaves_the_model_unchanged(monkeypatch):
    original = LoraLinear.__init__

    def last_one_fails(layer, base, **rest):
        if base.out_features == 16:
            raise MemoryError
        original(layer, base, **rest)

    monkeypatch.setattr(LoraLinear, "__init__", last_one_fails)
    model = model_of()
    with pytest.raises(MemoryError):
        adapt(model, LoraConfig(), seed=0)
    monkeypatch.undo()
    assert not lora_layers(model) and n_trainable(model) == n_parameters(model)


# Merged


WEIGHTS = st.floats(width=32, allow_nan=False, min_value=-(2.0**100), max_value=2.0**100)


@settings(max_examples=60, deadline=None)
@given(st.lists(WEIGHTS, min_size=12, max_size=12), st.lists(WEIGHTS, min_size=10, max_size=10),
       st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_unmerge_gives_back_the_bits_whatever_they_were(weight, factors, dtype):
    model = nn.Sequential(nn.Linear(3, 4, dtype=dtype)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor(weight, dtype=dtype).reshape(4, 3))
    adapt(model, LoraConfig(rank=1, targets=("0",)), seed=0)
    with torch.no_grad():
        model[0].lora_A.copy_(torch.tensor(factors[:3], dtype=dtype).reshape(1, 3))
        model[0].lora_B.copy_(torch.tensor(factors[3:7], dtype=dtype).reshape(4, 1))
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    before = model[0].weight.detach().view(integers).clone()
    merge(model)
    unmerge(model)
    assert torch.equal(model[0].weight.detach().view(integers), before)


def test_not_a_number_and_negative_zero_come_back_as_the_bits_they_were():
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    payload = torch.tensor([[0x7FC0BEEF, -0x80000000], [0x7F800000, 1]], dtype=torch.int64).to(torch.int32)
    with torch.no_grad():
        model[0].weight.view(torch.int32).copy_(payload)
    adapt(model, LoraConfig(rank=1, targets=("0",)), seed=0)
    drawn(model)
    merge(model)
    unmerge(model)
    assert torch.equal(model[0].weight.detach().view(torch.int32), payload)


def test_a_merged_model_computes_the_same_within_the_stated_tolerance_and_more_in_float64():
    model = drawn(model_of().eval())
    adapt(model, LoraConfig(targets=("*.attention.*", "*.mlp.*")), seed=0)
    drawn(model)
    tokens = torch.arange(32).reshape(4, 8)
    for wide in (False, True):
        model = model.double() if wide else model
        with torch.no_grad():
            apart = model(tokens)
            merge(model)
            together = model(tokens)
            unmerge(model)
        torch.testing.assert_close(together, apart, rtol=1e-13 if wide else 1e-5, atol=1e-14 if wide else 1e-6)
        assert not wide or torch.equal(together.float(), apart.float())


def test_a_base_from_which_adapters_were_subtracted_is_another_base():
    "The approach that was rejected, so that the test above is known to be able to fail."
    model = model_of(SMOKE)
    weight = model.blocks[0].attention.qkv.weight.detach()
    before = weight.clone()
    product = 2 * torch.randn(96, 4) @ torch.randn(4, 32)
    changed = ((weight + product) - product != before).float().mean()
    assert changed > 0.5


def test_a_merged_model_is_used_and_nothing_else():
    model = model_of()
    adapt(model, LoraConfig(), seed=0)
    adapters, tokens = AdapterState(drawn(model)), torch.arange(8).reshape(1, 8)
    merge(model)
    model.eval()(tokens)
    for refused in (partial(merge, model), partial(AdapterState, model), partial(base_digest, model),
                    partial(peft_files, model), partial(merged_state, model), model.state_dict,
                    partial(model.train(), tokens)):
        with pytest.raises(LoraError, match=r"unmerge\(model\)"):
            refused()
    with torch.no_grad():
        model(tokens)  # without gradients the training mode is only a mode
        adapters.get_parameter("blocks.0.attention.qkv.lora_B").add_(1.0)
        with pytest.raises(LoraError, match="changed since"):
            model(tokens)
    unmerge(model)
    model(tokens).sum().backward()


def test_a_merged_model_cannot_be_saved_whole_and_can_again_once_unmerged(tmp_path):
    "Its file would hold each adapter twice, and a restore would give a model that nobody trained."
    model = drawn(model_of_adapted())
    contract, expected = Contract(model=model), bits(model)
    with CheckpointStore(tmp_path) as store:
        merge(model)
        with pytest.raises(ContractError, match="got merged ones"):
            store.save(contract, step=0)
        copied = copy.deepcopy(model)
        unmerge(copied)
        assert bits(copied) == expected
        with pytest.raises(LoraError):  # the copy is unmerged alone
            model.state_dict()
        unmerge(model)
        store.save(contract, step=0)
        drawn(model, seed=9)
        store.restore(contract)
    assert bits(model) == expected


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("taken", [copy.deepcopy, lambda model: AveragedModel(model).module, pickled,
                                   lambda model: pickled(copy.deepcopy(model))],
                         ids=["deepcopy", "average", "pickle", "both"])
def test_a_copy_of_a_merged_model_is_used_and_refused_like_the_model(taken):
    model = drawn(model_of_adapted()).eval()
    tokens, expected = torch.arange(8).reshape(1, 8), bits(model)
    merge(model)
    copied = taken(model).eval()
    with torch.no_grad():
        assert torch.equal(copied(tokens), model(tokens))
    for refused in (partial(merge, copied), copied.state_dict, partial(copied.load_state_dict, {}),
                    partial(drawn(copied, seed=9), tokens)):
        with pytest.raises(LoraError, match=r"unmerge\(model\)"):
            refused()
    unmerge(copied)
    drawn(copied)
    assert bits(copied) == expected
    model(tokens)  # still merged, and none of this was done to it


def test_nothing_is_loaded_into_a_merged_model():
    model = drawn(model_of_adapted())
    other = drawn(model_of_adapted(), seed=9)
    with torch.no_grad():
        other.token_embedding.weight.add_(1.0)
    expected = bits(model)
    merge(model)
    layer = model.blocks[0].attention.qkv
    for module, state in ((model, other.state_dict()), (layer, other.blocks[0].attention.qkv.state_dict()),
                          (model.blocks[0], other.blocks[0].state_dict())):
        for how in ({}, {"assign": True}, {"strict": False}):
            with pytest.raises(LoraError, match="expected adapters that stand apart to be loaded into"):
                module.load_state_dict(state, **how)
    outer = nn.Sequential(model)
    with pytest.raises(LoraError, match="to be loaded into"):
        outer.load_state_dict({f"0.{name}": tensor for name, tensor in other.state_dict().items()})
    unmerge(model)
    assert bits(model) == expected  # not even what comes before the first adapted layer
    model.load_state_dict(other.state_dict())
    assert bits(model) == bits(other)


@pytest.mark.parametrize("edit", [
    lambda layer: layer.lora_A.data.add_(1.0),
    lambda layer: layer.lora_B.data.view(torch.int32).bitwise_xor_(1),
    lambda layer: setattr(layer.lora_B, "data", layer.lora_B.data + 1),
    lambda layer: setattr(layer, "lora_A", nn.Parameter(torch.zeros_like(layer.lora_A))),
    lambda layer: layer.lora_A.detach().numpy().fill(0.5),
    lambda layer: setattr(layer, "alpha", 2 * layer.alpha),
])
def test_an_edit_that_no_counter_sees_is_noticed(edit):
    model, tokens = drawn(model_of_adapted()).eval(), torch.arange(8).reshape(1, 8)
    merge(model)
    model(tokens)
    edit(model.blocks[0].attention.projection)
    with pytest.raises(LoraError, match="changed since"):
        model(tokens)


def beside(other: str) -> nn.Module:
    "Two linear layers whose weights are one, lie in one memory in some way, or beside one another in it."
    memory, model = torch.randn(8, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wide = torch.randn(4, 8, dtype=torch.float16 if "float16" in other else torch.float32)
    model[0].weight = nn.Parameter(wide[:, :4] if "columns" in other else memory[:4])
    if other == "a buffer":
        model[1].register_buffer("shadow", memory[2:6])
        return model
    rest = {"itself": lambda: model[0].weight, "the same memory": lambda: nn.Parameter(memory[:4].t()),
            "a part of it": lambda: nn.Parameter(memory[3:7]), "the rows after it": lambda: nn.Parameter(memory[4:]),
            "columns beside it": lambda: nn.Parameter(wide[:, 4:]), "columns of it": lambda: nn.Parameter(wide[:, 3:7])}
    model[1].weight = rest[other.removesuffix(" in float16")]()
    return model


@pytest.mark.parametrize("other, told", [
    ("itself", "0.weight and 1.weight are one tensor"), ("the same memory", "0.weight and 1.weight lie in one memory"),
    ("a part of it", "0.weight and 1.weight lie in one memory"), ("the rows after it", ""),
    ("a buffer", "0.weight and 1.shadow lie in one memory"), ("columns beside it", ""),
    ("columns beside it in float16", ""), ("columns of it", "0.weight and 1.weight lie in one memory"),
])
def test_a_weight_in_the_memory_of_another_is_not_merged(other, told):
    model = beside(other)
    adapt(model, LoraConfig(rank=1, targets=("0",)), seed=0)
    others = {name: tensor for name, tensor in bits(drawn(model)).items() if name.startswith("1.")}
    for use in (merge, unmerge, merged_state):
        if told and use is not unmerge:
            with pytest.raises(LoraError, match=told):
                use(model)
        else:
            use(model)
    assert {name: tensor for name, tensor in bits(model).items() if name.startswith("1.")} == others


def test_a_tensor_that_lies_within_another_is_found_behind_one_that_only_lies_between():
    "Sorted by address, the columns beside the weight stand between it and the last of its own columns."
    wide, model = torch.randn(4, 8), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight, model[1].weight = nn.Parameter(wide[:, :4]), nn.Parameter(wide[:, 4:])
    model.register_buffer("corner", wide[3, 3:4])
    adapt(model, LoraConfig(rank=1, targets=("0",)), seed=0)
    with pytest.raises(LoraError, match="0.weight and corner lie in one memory: .* would change"):
        merge(model)


def test_memory_of_which_it_would_take_long_to_tell_is_refused_with_a_may():
    memory, model = torch.zeros(10**6), nn.Sequential(nn.Linear(8, 8))
    model[0].weight = nn.Parameter(memory.as_strided((8, 8), (5482, 3402)))
    model.register_buffer("shadow", memory.as_strided((6,) * 5, (7004, 731, 1583, 28747, 13749), 1))
    adapt(model, LoraConfig(rank=1, targets=("0",)), seed=0)
    with pytest.raises(LoraError, match="0.weight and shadow may lie in one memory: .* may change"):
        merge(model)


def instructions_to_look_for_shared_memory(n_layers: int) -> int:
    "How many instructions of Python the look takes at a model of so many adapted layers."
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(n_layers)))
    adapt(model, LoraConfig(rank=1, targets=("*",)), seed=0)
    count, before = 0, sys.gettrace()

    def tracer(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return tracer

    sys.settrace(tracer)
    try:
        lora._to_be_merged(model)
    finally:
        sys.settrace(before)
    return count


def test_a_look_for_shared_memory_does_not_compare_each_layer_with_each():
    assert instructions_to_look_for_shared_memory(80) < 5 * instructions_to_look_for_shared_memory(20)


def test_a_backward_pass_through_merged_adapters_is_refused_in_evaluation_mode_too():
    "The weights of the head train beside them, so that there is a gradient, and none for the adapters."
    model, tokens = drawn(model_of_adapted()).eval(), torch.arange(8).reshape(1, 8)
    model.head.weight.requires_grad_(True)
    merge(model)
    with pytest.raises(LoraError, match="expected adapters that stand apart for a backward pass"):
        model(tokens).sum().backward()
    for layer in lora_layers(model).values():
        layer.lora_A.requires_grad_(False)
        layer.lora_B.requires_grad_(False)
    model(tokens).sum().backward()
    assert model.head.weight.grad.any()


def test_not_a_number_in_an_adapter_is_no_change_of_it():
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    adapt(model, LoraConfig(rank=1, targets=("0",)), seed=0)
    with torch.no_grad():
        model[0].lora_A.fill_(float("nan"))
        merge(model)
        assert model(torch.ones(1, 2)).isnan().all()


def test_a_merged_model_may_be_converted_and_still_be_unmerged():
    model = drawn(model_of_adapted()).eval()
    expected = bits(copy.deepcopy(model).double())
    merge(model)
    model.double()
    with torch.no_grad():
        model(torch.arange(8).reshape(1, 8))
    unmerge(model)
    assert bits(model) == expected


def test_a_merge_rounds_twice_and_what_is_said_of_it_is_no_more_than_that():
    "By hand: the sum is just above the middle of two float32, and on it in float64."
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    adapt(model, LoraConfig(rank=2, alpha=2.0, targets=("0",)), seed=0)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].lora_A.copy_(torch.tensor([[2.0**-12], [2.0**-30]]))
        model[0].lora_B.copy_(torch.tensor([[2.0**-12, 2.0**-30]]))
    merge(model)
    assert model[0].weight.item() == 1.0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31))
def test_a_merged_weight_is_as_near_to_the_exact_sum_as_two_roundings_allow(seed):
    model = nn.Sequential(nn.Linear(3, 2))
    adapt(model, LoraConfig(rank=2, alpha=3.0, targets=("0",)), seed=seed)
    layer = drawn(model, seed)[0]
    w, a, b = (tensor.detach().tolist() for tensor in (layer.weight, layer.lora_A, layer.lora_B))
    merge(model)
    now = layer.weight.detach()
    above = torch.nextafter(now.abs(), torch.tensor(float("inf"))).tolist()
    for i, j in ((i, j) for i in range(2) for j in range(3)):
        parts = [Fraction(3, 2) * Fraction(b[i][r]) * Fraction(a[r][j]) for r in range(2)]
        exact = Fraction(w[i][j]) + sum(parts)
        half_unit = (Fraction(above[i][j]) - abs(Fraction(now[i, j].item()))) / 2
        wide = Fraction(6, 2**53) * (abs(Fraction(w[i][j])) + sum(map(abs, parts)))
        assert abs(Fraction(now[i, j].item()) - exact) <= half_unit + wide


def test_the_merged_state_is_what_the_merged_model_computes_with():
    model = drawn(model_of_adapted()).eval()
    handed_on = model_of(seed=9).eval()
    handed_on.load_state_dict(merged_state(model))
    merge(model)
    tokens = torch.arange(16).reshape(2, 8)
    assert torch.equal(handed_on(tokens), model(tokens))


def test_a_restore_under_a_merged_model_is_noticed_at_its_next_use(tmp_path):
    model = model_of()
    adapt(model, LoraConfig(), seed=0)
    contract = Contract(adapters=AdapterState(model))
    with CheckpointStore(tmp_path) as store:
        store.save(contract, step=0)
        drawn(model)
        merge(model.eval())
        store.restore(contract)
    with pytest.raises(LoraError, match="changed since"):
        model(torch.arange(8).reshape(1, 8))


# Saved


def test_a_checkpoint_of_adapters_holds_them_and_their_moments_and_nothing_of_the_base(tmp_path):
    run = TuningRun(SMOKE, LoraConfig())
    run.advance()
    with CheckpointStore(tmp_path) as store:
        path = store.save(run.contract).path
    manifest = verify(path)
    layers = [f"blocks.{i}.attention.{part}" for i in (0, 1) for part in ("qkv", "projection")]
    assert {name for name in manifest.tensors if name.startswith("adapters.")} == {
        f"adapters.{layer}.lora_{part}" for layer in layers for part in "AB"}
    moments = [e for name, e in manifest.tensors.items() if name.startswith("optimizer.") and "exp_avg" in name]
    assert sum(entry.n_bytes for entry in moments) == 2 * 4 * 1_536
    assert set(manifest.tree()) == {"adapters", "optimizer", "progress", "rng"}


def test_one_bit_of_the_base_is_enough_to_refuse_its_adapters(tmp_path):
    def contract_on(flip: bool) -> Contract:
        model = model_of()
        if flip:
            model.norm.bias.data.view(torch.int32)[3] ^= 1
        adapt(model, LoraConfig(), seed=0)
        return Contract(identity={"base": base_digest(model)}, adapters=AdapterState(model))

    with CheckpointStore(tmp_path) as store:
        store.save(contract_on(False), step=1)
        store.restore(contract_on(False))
        with pytest.raises(CheckpointMismatchError, match="base: checkpoint [0-9a-f]{64}, requested [0-9a-f]{64}"):
            store.restore(contract_on(True))


def parts_of(config: LoraConfig | None = None, change: Callable[[nn.Module], object] = id) -> Contract:
    "A contract of somebody who has thought of no identity."
    model = model_of()
    change(model)
    adapt(model, config or LoraConfig(), seed=0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return Contract(adapters=AdapterState(model), optimizer=optimizer)


@torch.no_grad()
def flip_a_bit(model: nn.Module) -> None:
    model.norm.bias.view(torch.int32)[3] ^= 1


@pytest.mark.parametrize("other, told", [
    ({"config": LoraConfig(alpha=4.0)}, r"adapters\.alpha: checkpoint 8\.0, requested 4\.0"),
    ({"change": flip_a_bit}, "adapters.base: checkpoint [0-9a-f]{64}, requested [0-9a-f]{64}"),
    ({"config": LoraConfig(rank=2)}, r"attention\.qkv\.lora_A: checkpoint float32 \(4, 16\), here float32 \(2,"),
    ({"config": LoraConfig(targets=("*.attention.qkv",))}, r"adapters\.blocks\.0\.attention\.projection\.lora_A: "),
    ({"config": LoraConfig(targets=("*.attention.*", "*.expand"))}, r"adapters\.blocks\.0\.mlp\.expand\.lora_A: "),
])
def test_adapters_are_refused_on_another_base_and_with_other_settings_whoever_made_the_contract(other, told):
    saved = freeze(parts_of().capture(step=1))
    parts_of().restore(saved)
    refusing = parts_of(**other)
    before = bits(refusing.participants["adapters"])
    with pytest.raises(CheckpointMismatchError, match=told):
        refusing.restore(saved)
    assert bits(refusing.participants["adapters"]) == before


def test_the_identity_of_adapters_stays_while_what_is_saved_with_them_moves():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    adapt(model, LoraConfig(targets=("0", "2"), rank=1), seed=0)
    model[1].requires_grad_(True)
    first = AdapterState(model).identity()
    drawn(model)
    with torch.no_grad():
        model[1].weight.add_(1)
    model(torch.arange(12.0).reshape(4, 3))
    assert AdapterState(model).identity() == first and first["alpha"] == 8.0
    lora_layers(model)["2"].alpha = 3.0
    assert AdapterState(model).identity()["alpha"] == {"0": 8.0, "2": 3.0}
    state = AdapterState(model)
    merge(model)
    with pytest.raises(LoraError, match="expected adapters that stand apart to tell whose they are"):
        state.identity()
    unmerge(model)
    with torch.no_grad():
        model[0].weight[0, 0] += 1
    assert state.identity()["base"] != first["base"]


@pytest.mark.parametrize("change, told", [
    (lambda model: model.double(), r"1\.running_mean: expected the tensor that the model had when"),
    (lambda model: setattr(model[1], "running_var", model[1].running_var + 1), r"1\.running_var: expected the tensor"),
    (lambda model: setattr(model[0], "lora_A", nn.Parameter(torch.zeros(1, 3))), r"0\.lora_A: expected the tensor"),
    (lambda model: model[2].requires_grad_(True), r"2\.weight: expected a frozen parameter, got one that trains"),
])
def test_what_adapters_no_longer_share_with_their_model_is_neither_saved_nor_restored(change, told):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    adapt(model, LoraConfig(targets=("0",), rank=1), seed=0)
    contract = Contract(adapters=AdapterState(model))
    saved = freeze(contract.capture(step=0))
    contract.restore(saved)
    copied = copy.deepcopy(model)
    change(model)
    with pytest.raises(ContractError, match=f"adapters: {told}"):
        contract.capture(step=0)
    with pytest.raises(CheckpointError):
        contract.restore(saved)
    Contract(adapters=AdapterState(copied)).restore(saved)
    model[0].lora_A.requires_grad_(False)  # what stops to train is saved as before
    Contract(adapters=AdapterState(copied)).restore(saved)


def load_twice(model: nn.Module) -> None:
    model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})


def through_data(model: nn.Module) -> None:
    model[0].weight.data.mul_(2)


def other_memory(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data * 2


def other_alpha(model: nn.Module) -> None:
    lora_layers(model)["0"].alpha = 3.0


@pytest.mark.parametrize("change, when, part", [
    (load_twice, "at once", "base"), (load_twice, "later", "base"), (other_memory, "later", "base"),
    (other_alpha, "at once", "alpha"), (other_alpha, "later", "alpha"), (through_data, "at once", "base"),
])
def test_a_base_that_is_loaded_after_the_contract_was_made_is_neither_saved_nor_restored_to(change, when, part):
    def run():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        adapt(model, LoraConfig(targets=("0",), rank=1), seed=0)
        return model, Contract(adapters=AdapterState(model))

    model, contract = run()
    saved = freeze(contract.capture(step=0))
    other, here = run()
    if when == "later":
        here.capture(step=0)
    change(other)
    with pytest.raises(ContractError, match=f"adapters: expected the {part} that the contract was made with"):
        here.capture(step=0)
    with pytest.raises(CheckpointError, match=f"expected the {part} that the contract was made with"):
        here.restore(saved)
    Contract(adapters=AdapterState(other)).capture(step=0)
    merge(model)
    contract.capture(step=0)
    unmerge(model)  # the base's bits are back
    contract.capture(step=0)
    contract.restore(saved)


def test_the_digest_of_a_base_covers_values_names_and_buffers_and_no_adapter():
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    first = base_digest(plain)
    adapted = copy.deepcopy(plain)
    adapt(adapted, LoraConfig(targets=("0",)), seed=0)
    assert base_digest(drawn(adapted)) == first
    moved, renamed, minus = copy.deepcopy(plain), nn.Sequential(), copy.deepcopy(plain)
    moved[1].running_mean += 1
    renamed.add_module("zero", plain[0])
    renamed.add_module("1", plain[1])
    minus[0].bias.data.zero_()
    plus = copy.deepcopy(minus)
    plus[0].bias.data.neg_()
    assert len({first, base_digest(moved), base_digest(renamed), base_digest(minus), base_digest(plus)}) == 5
    plain.register_buffer("scratch", torch.zeros(2), persistent=False)  # made by the constructor, in no state dict
    assert base_digest(plain) == first


def test_whatever_else_trains_beside_the_adapters_is_saved_with_them():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    adapt(model, LoraConfig(targets=("0",)), seed=0)
    model[2].requires_grad_(True)
    assert set(AdapterState(model).state_dict()) == {
        "0.lora_A", "0.lora_B", "1.running_mean", "1.running_var", "1.num_batches_tracked", "2.weight", "2.bias"}


def test_a_restore_fills_the_model_and_not_a_copy(tmp_path):
    model = drawn(model_of_adapted(), seed=1)
    contract = Contract(identity={"base": base_digest(model)}, adapters=AdapterState(model))
    expected = bits(model)
    with CheckpointStore(tmp_path) as store:
        store.save(contract, step=0)
        drawn(model, seed=2)
        assert bits(model) != expected
        store.restore(contract)
    assert bits(model) == expected


def model_of_adapted() -> Transformer:
    model = model_of()
    adapt(model, LoraConfig(), seed=0)
    return model


def test_other_settings_of_the_adapters_are_drift(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(TuningRun(TINY, LoraConfig()).contract)
        with pytest.raises(CheckpointMismatchError, match=r"lora\.alpha: checkpoint 8\.0, requested 4\.0"):
            store.restore(TuningRun(TINY, LoraConfig(alpha=4.0)).contract)
        with pytest.raises(CheckpointMismatchError, match=r"lora\.rank: checkpoint 4, requested 2"):
            store.restore(TuningRun(TINY, LoraConfig(rank=2)).contract)


def test_a_run_whose_base_came_out_otherwise_is_refused_although_its_configuration_is_the_same(tmp_path, monkeypatch):
    "As under another release of torch that draws other weights from the same seed."
    with CheckpointStore(tmp_path) as store:
        store.save(TuningRun(TINY, LoraConfig()).contract)
        store.restore(TuningRun(TINY, LoraConfig()).contract)
        original = Transformer.from_config.__func__

        def otherwise(cls, config):
            model = original(cls, config)
            model.norm.weight.data[0] += 1e-6
            return model

        monkeypatch.setattr(Transformer, "from_config", classmethod(otherwise))
        with pytest.raises(CheckpointMismatchError) as refused:
            store.restore(TuningRun(TINY, LoraConfig()).contract)
    assert [drift.field for drift in refused.value.fields] == ["adapters.base"]


# Resumed


def test_a_lora_run_is_resumed_bit_for_bit_after_sigkill_and_misses_every_participant():
    make_run = partial(tuning_run, config=TINY.replace(dropout=0.2), lora=LoraConfig())
    proof = prove_restart(make_run, steps=4, interrupt_at=[2, 3], how="sigkill", save_every=2, jobs=2,
                          boundaries=["after_backward", "during_write"], progress_bar=False)
    proof.raise_if_different()
    assert len(proof.rows) > 5 and {row.outcome for row in proof.rows} == {"equal"}
    assert {one.participant: one.outcome for one in proof.knockouts} == dict.fromkeys(
        ("adapters", "optimizer", "progress", "rng"), "caught")


def test_an_average_of_the_adapters_is_kept_and_resumed_too(tmp_path):
    config = TINY.replace(ema_decay=0.5)
    proof = prove_restart(partial(tuning_run, config=config, lora=LoraConfig()), steps=4, interrupt_at=[2, 3],
                          how="clean", in_process=True, progress_bar=False)
    proof.raise_if_different()
    assert {one.participant: one.outcome for one in proof.knockouts}["ema"] == "caught"
    run = TuningRun(config, LoraConfig())
    for _ in range(3):
        run.advance()
    names = set(run.contract.capture().tree["ema"])
    assert names == {"n_averaged"} | {f"module.{name}" for name in run.contract.capture().tree["adapters"]}
    base = {name: data for name, data in bits(run.model).items() if "lora" not in name}
    averaged = bits(run.ema.module)
    assert all(averaged[name] == data for name, data in base.items())
    assert compare_tuning(config).arms["full"].base_digest == compare_tuning(TINY).arms["lora"].base_digest


def adapters_alone(directory: Path) -> TuningRun:
    "A run that saves what a file of adapters usually holds."
    run = TuningRun(TINY.replace(dropout=0.0), LoraConfig())
    parts = run.contract.participants
    run.contract = Contract(adapters=parts["adapters"], progress=parts["progress"])
    return run


def test_weights_of_adapters_alone_are_no_restart():
    proof = prove_restart(adapters_alone, steps=4, interrupt_at=[2], in_process=True, knock_out=False,
                          progress_bar=False)
    assert proof.verdict is Verdict.DIVERGENT
    found = [row.divergence for row in proof.rows if row.divergence]
    assert found and {divergence.step for divergence in found} == {3}
    assert "adapters.blocks.0.attention" in str(found[0])


def test_the_full_arm_is_the_run_that_train_does(tmp_path):
    result = train(TINY, tmp_path / "train", progress_bar=False)
    arm = compare_tuning(TINY).arms["full"]
    assert arm.state_digest == result.state_digest and arm.losses[-1] == result.final_loss


# Compared


def test_the_arms_begin_alike_and_part_at_the_second_step():
    comparison = compare_tuning(TINY)
    full, lora = comparison.arms["full"], comparison.arms["lora"]
    assert full.losses[0] == lora.losses[0] and full.losses[1] != lora.losses[1]
    assert full.base_digest == lora.base_digest == base_digest(TrainingRun(TINY).model)
    assert full.batch_digest == lora.batch_digest and full.state_digest != lora.state_digest
    assert lora.checkpoint_bytes < full.checkpoint_bytes
    plain = json.loads(json.dumps(comparison.to_plain(), allow_nan=False))
    assert plain["shared_start"]["initial_loss"] == plain["arms"]["lora"]["initial_loss"] == full.losses[0]
    assert "trainable parameters  3,952 of 3,952  384 of 4,336\n" in comparison.table()
    for arm in (full, lora):
        assert arm.tensor_bytes == sum(arm.state_bytes.values()) == plain["arms"][arm is lora and "lora" or "full"][
            "tensor_bytes"] and arm.seconds > 0
    assert plain["lora_to_full"]["tensor_bytes"] == lora.tensor_bytes / full.tensor_bytes
    for name, arm in comparison.arms.items():
        there = plain["arms"][name]
        assert (there["initial_loss"], there["final_loss"]) == (arm.losses[0], arm.losses[5]) and there["seconds"] > 0


def test_the_arms_have_the_same_settings_of_the_optimizer_at_every_step():
    full, lora = TuningRun(TINY, None), TuningRun(TINY, LoraConfig())
    rates = []
    for _ in range(6):
        settings = [[{name: value for name, value in group.items() if name != "params"}
                     for group in run.optimizer.param_groups] for run in (full, lora)]
        assert settings[0] == settings[1]
        rates.append(settings[0][0]["lr"])
        full.advance(), lora.advance()
    assert settings[0][0]["weight_decay"] == 0.1 and len(set(rates)) > 3  # the schedule moves


@pytest.mark.parametrize("part", ["base", "batches"])
def test_arms_that_do_not_begin_alike_are_no_comparison(monkeypatch, part):
    original = TuningRun.__init__

    def altered(run, config, lora, *rest, **more):
        original(run, config, lora, *rest, **more)
        if lora is not None and part == "base":
            run.base_digest = base_digest(model_of(seed=9))
        if lora is not None and part == "batches":
            run.batches.seed += 1

    monkeypatch.setattr(TuningRun, "__init__", altered)
    told = {"base": "base_digest", "batches": "batch_digest"}[part]
    with pytest.raises(TrainingError, match=f"{told}: expected the same for both arms"):
        compare_tuning(TINY)


def test_an_adapter_that_is_no_no_op_at_the_start_is_noticed(monkeypatch):
    original = TuningRun.__init__

    def altered(run, *arguments, **more):
        original(run, *arguments, **more)
        drawn(run.model)

    monkeypatch.setattr(TuningRun, "__init__", altered)
    with pytest.raises(TrainingError, match="loss of the first step"):
        compare_tuning(TINY)


def test_a_wrong_pattern_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(ConfigError, match="targets"):
        compare_tuning(TINY, targets=["*.attention.q"], directory=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("rank", [17, 1_000])
def test_a_rank_above_the_smaller_side_of_a_layer_is_refused_before_anything_is_trained(tmp_path, rank):
    with pytest.raises(ConfigError, match=r"rank: expected at most 16, the smaller side of blocks\.0\.attention\.qkv"):
        compare_tuning(TINY, rank=rank, directory=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_the_rank_may_be_as_large_as_the_smaller_side_and_no_larger_than_that_of_each_layer():
    assert compare_tuning(TINY.replace(steps=1), rank=16).arms["lora"].losses
    with pytest.raises(ConfigError, match="at most 16, the smaller side of blocks.0.mlp.expand"):
        compare_tuning(TINY, rank=17, targets=["*.mlp.expand"])


@pytest.mark.parametrize("change", [{"checkpoint_mode": "async"}, {"checkpoint_mode": "overlapped"},
                                    {"on_save_error": "continue"}])
def test_a_setting_of_saving_that_a_comparison_does_not_have_is_refused_and_not_recorded(tmp_path, change):
    with pytest.raises(ConfigError, match=f"{next(iter(change))}: expected \"(sync|stop)\", got"):
        compare_tuning(TINY.replace(**change), directory=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_both_arms_run_on_the_device_that_is_asked_for(tmp_path, monkeypatch):
    if not torch.cuda.is_available():
        assert compare_tuning(TINY, device="auto").environment["devices"] == "cpu"
    for wrong in ("tpu", "meta", "cuda:99"):
        with pytest.raises(TrainingError, match=f"expected (cpu, cuda|one of the).*got '{wrong}'"):
            compare_tuning(TINY, device=wrong, directory=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    seen, original = [], TrainingRun.__init__
    monkeypatch.setattr(TrainingRun, "__init__", lambda run, *given, **more: (
        seen.append(more["device"]), original(run, *given, **more))[1])
    compare_tuning(TINY.replace(steps=1))
    assert seen == ["cpu", "cpu"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_both_arms_run_on_cuda_and_begin_alike():
    comparison = compare_tuning(TINY, device="cuda")
    assert "cuda" in comparison.environment["devices"]
    assert comparison.arms["full"].state_digest != comparison.arms["lora"].state_digest


def test_the_seconds_of_an_arm_are_those_of_all_calls_and_none_where_a_call_left_no_note(tmp_path):
    first = compare_tuning(TINY, directory=tmp_path).arms["lora"]
    again = compare_tuning(TINY, directory=tmp_path)
    assert again.arms["lora"].seconds == first.seconds > 0
    note = tmp_path / "lora" / "seconds.json"
    noted = json.loads(note.read_text())
    assert noted == {"step": 6, "seconds": pytest.approx(first.seconds, abs=1e-3)}
    note.write_text(json.dumps(noted | {"seconds": 1000.0}))
    longer = compare_tuning(TINY.replace(steps=8), directory=tmp_path)
    assert 1000 < longer.arms["lora"].seconds < 1060 and longer.arms["full"].seconds < 60
    note.write_text(json.dumps({"step": 6, "seconds": 1000.0}))  # as where the process died before it noted step 8
    unknown = compare_tuning(TINY.replace(steps=10), directory=tmp_path)
    assert unknown.arms["lora"].seconds is None and unknown.to_plain()["arms"]["lora"]["seconds"] is None
    assert "not known" in unknown.table() and unknown.arms["full"].seconds > 0
    note.unlink()
    assert compare_tuning(TINY.replace(steps=10), directory=tmp_path).arms["lora"].seconds is None
    for damaged in ("torn", "[]", '{"step": 10, "seconds": NaN}', '{"step": 10, "seconds": -1}'):
        note.write_text(damaged)
        assert compare_tuning(TINY.replace(steps=10), directory=tmp_path).arms["lora"].seconds is None


def compare_in_child(folder: Path, sent: str, at: int) -> subprocess.CompletedProcess[str]:
    "Run the comparison in a process that gets a signal when it completes the given step, counted over both arms."
    program = textwrap.dedent("""
        import json, os, signal, sys
        from pathlib import Path
        import torch
        from fault_tolerant_transformer_lab.config import ExperimentConfig
        from fault_tolerant_transformer_lab.lora import compare_tuning

        torch.set_num_threads(1)
        folder, sent, at, config = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
        seen = []

        def on_boundary(name, step):
            if name == "after_update":
                seen.append(step)
                if len(seen) == at:
                    os.kill(os.getpid(), getattr(signal, sent))

        compare_tuning(ExperimentConfig(**config), directory=folder, on_boundary=on_boundary)
    """)
    return subprocess.run([sys.executable, "-c", program, str(folder), sent, str(at), json.dumps(TINY.describe())],
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)


def test_both_arms_killed_and_gone_on_with_end_bitwise_equal(tmp_path):
    expected = compare_tuning(TINY)
    # the full arm dies in its step 3, after the checkpoint of step 2; the other dies 4 + 5 steps later, after that of 4
    for at in (3, 4 + 5):
        assert compare_in_child(tmp_path, "SIGKILL", at).returncode == -signal.SIGKILL
    found = compare_tuning(TINY, directory=tmp_path)
    assert [arm.resumed_from for arm in found.arms.values()] == [6, 4]
    for name, arm in found.arms.items():
        assert arm.state_digest == expected.arms[name].state_digest and arm.losses == expected.arms[name].losses
        assert arm.tensor_bytes == expected.arms[name].tensor_bytes and arm.seconds > 0
        direct = compare_state(expected.arms[name].state_digest, tmp_path / name / "checkpoints")
        assert direct


def compare_state(digest: str, checkpoints: Path) -> bool:
    "Whether the newest file verifies and holds the state."
    newest = max(checkpoints.glob("step-*.safetensors"))
    return verify(newest).state_digest == digest


def test_a_signal_saves_the_arm_under_way_and_says_how_to_go_on(tmp_path):
    stopped = compare_in_child(tmp_path, "SIGTERM", 6 + 3)
    assert "TuningInterrupted: SIGTERM after step 3 of an arm: saved as" in stopped.stderr
    assert "repeat it with the same folder to go on" in stopped.stderr
    newest = max((tmp_path / "lora" / "checkpoints").glob("step-*.safetensors"))
    assert read_manifest(newest).step == 3
    found = compare_tuning(TINY, directory=tmp_path)
    assert [(arm.resumed_from, arm.steps_done) for arm in found.arms.values()] == [(6, 0), (3, 3)]
    assert found.arms["lora"].state_digest == compare_tuning(TINY).arms["lora"].state_digest


def test_a_finished_comparison_is_read_again_and_a_longer_one_goes_on(tmp_path):
    first = compare_tuning(TINY, directory=tmp_path)
    again = compare_tuning(TINY, directory=tmp_path)
    assert [arm.steps_done for arm in again.arms.values()] == [0, 0]
    same = ("losses", "state_digest", "batch_digest", "base_digest", "checkpoint_bytes", "state_bytes")
    assert all(getattr(again.arms[name], fact) == getattr(first.arms[name], fact) for name in first.arms
               for fact in same)
    longer = compare_tuning(TINY.replace(steps=8), directory=tmp_path)
    assert [len(arm.losses) for arm in longer.arms.values()] == [8, 8]
    with pytest.raises(TrainingError, match="at most 6 steps, found one of 8"):
        compare_tuning(TINY, directory=tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"lora\.rank"):
        compare_tuning(TINY.replace(steps=8), directory=tmp_path, rank=2)


def test_nothing_is_started_over_silently(tmp_path):
    compare_tuning(TINY, directory=tmp_path)
    for path in (tmp_path / "lora" / "checkpoints").glob("step-*.safetensors"):
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(NoCheckpointError, match="none can be used"):
        compare_tuning(TINY, directory=tmp_path)


def test_the_interruption_says_so_where_nothing_was_saved():
    told = str(TuningInterrupted(signal.SIGINT, None, 0))
    assert told == ("SIGINT after step 0 of an arm: no step of it was completed; repeat it with the same folder to go "
                    "on")


def test_the_committed_artifact_is_what_the_comparison_gives():
    committed = json.loads(ARTIFACT.read_text())
    found = compare_tuning(SMOKE).to_plain()
    assert committed.keys() == found.keys()
    assert ExperimentConfig(**committed["config"]) == SMOKE
    for name in ("fingerprint", "lora"):
        assert committed[name] == found[name]
    for arm, counts in {"full": (28_032, 28_032), "lora": (1_536, 29_568)}.items():
        there, here = committed["arms"][arm], found["arms"][arm]
        assert there.keys() == here.keys()
        assert (there["trainable_parameters"], there["total_parameters"]) == counts
        assert there["state_bytes"] == here["state_bytes"] and there["tensor_bytes"] == here["tensor_bytes"]
        assert there["losses"] == pytest.approx(here["losses"], abs=1e-3)
        assert (there["resumed_from"], there["steps_done"]) == (None, 8)
    assert committed["shared_start"]["batch_digest"] == found["shared_start"]["batch_digest"]  # integers: any machine
    if committed["environment"] == found["environment"]:
        for arm in ("full", "lora"):
            assert committed["arms"][arm]["state_digest"] == found["arms"][arm]["state_digest"]
    assert not re.search(r"/tmp/|/work/|/home/", ARTIFACT.read_text())


# Exchanged


def test_files_for_peft_are_read_back_and_belong_to_their_base(tmp_path):
    model = drawn(model_of_adapted())
    for layout in ("lab", "gpt2"):
        export_peft(model, tmp_path / layout, layout=layout)
        fresh = model_of()
        assert import_peft(fresh, tmp_path / layout, layout=layout).rank == 4
        assert bits(fresh) == bits(model)
        with pytest.raises(LoraError, match="expected adapters of this base"):
            import_peft(model_of(seed=6), tmp_path / layout, layout=layout)
        import_peft(model_of(seed=6), tmp_path / layout, layout=layout, allow_other_base=True)


def test_gpt2_has_a_name_for_every_module_of_the_model_and_for_no_other():
    names = {name.rpartition(".")[0] for name, _ in model_of(SMOKE).named_parameters()}
    assert len({gpt2_name(name) for name in names}) == len(names) == 15
    for odd in ("blocks.0", "blocks.x.attention.qkv", "blocks.0.attention.query", "encoder", ""):
        with pytest.raises(LoraError, match="expected a module that GPT-2 has too"):
            gpt2_name(odd)


@pytest.mark.parametrize("change", [
    lambda config, tensors: config.update(r=3),
    lambda config, tensors: config.update(r="4"),
    lambda config, tensors: config.update(r=0),
    lambda config, tensors: config.update(lora_alpha=True),
    lambda config, tensors: config.update(lora_alpha=0),
    lambda config, tensors: config.update(lora_alpha=-8.0),
    lambda config, tensors: config.update(lora_alpha=10**400),
    lambda config, tensors: config.update(lora_alpha="8"),
    lambda config, tensors: tensors.update({name: tensor.to(torch.int8) for name, tensor in tensors.items()}),
    lambda config, tensors: config.pop("lora_alpha"),
    lambda config, tensors: config.update(peft_type="IA3"),
    lambda config, tensors: config.update(lora_dropout="some"),
    lambda config, tensors: config.update(lora_dropout=True),
    lambda config, tensors: config.update(a_later_switch=True),
    lambda config, tensors: tensors.popitem(),
    lambda config, tensors: tensors.clear(),
    lambda config, tensors: tensors.update({"base_model.model.blocks.0.attention.qkv.lora_magnitude_vector":
                                            torch.zeros(48)}),
    lambda config, tensors: tensors.update({name: torch.zeros(4, 4) for name in tensors}),
])
def test_a_file_that_does_not_fit_is_refused_with_the_model_unchanged(tmp_path, change):
    from safetensors.torch import load, save

    files = peft_files(model_of_adapted())
    config, tensors = json.loads(files["adapter_config.json"]), load(files["adapter_model.safetensors"])
    change(config, tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(save(tensors))
    model = model_of()
    with pytest.raises(LoraError, match="expected"):
        import_peft(model, tmp_path)
    assert not lora_layers(model) and n_trainable(model) == n_parameters(model)


@pytest.mark.parametrize("data", [b"", b"not a tensor file", b"\xff" * 64])
def test_what_is_no_file_of_tensors_is_refused(tmp_path, data):
    (tmp_path / "adapter_config.json").write_bytes(peft_files(model_of_adapted())["adapter_config.json"])
    (tmp_path / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(LoraError, match=r"adapter_model\.safetensors"):
        import_peft(model_of(), tmp_path)


@pytest.mark.parametrize("data, told", [
    (b"", "found an empty one"), (b"{", "expected JSON, got a fault at line 1"), (b"\xff\xfe", "expected UTF-8 text"),
    (b"[]", "expected a JSON object, got []"), (b'{"r": 4, "r": 8}', "r: expected each key once"),
])
def test_a_configuration_that_is_none_is_refused_by_the_name_of_its_file(tmp_path, data, told):
    export_peft(model_of_adapted(), tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(data)
    with pytest.raises(LoraError, match=r"adapter_config\.json") as refused:
        import_peft(model_of(), tmp_path)
    assert told in str(refused.value) and "vocab_size" not in str(refused.value)


def test_a_file_in_place_of_the_folder_and_a_model_with_adapters_are_refused_as_that(tmp_path):
    export_peft(model_of_adapted(), tmp_path)
    with pytest.raises(LoraError, match=r"adapter_model\.safetensors: expected the folder that PEFT wrote, got a file"):
        import_peft(model_of(), tmp_path / "adapter_model.safetensors")
    with pytest.raises(LoraError, match="expected a model without adapters, got one with 2"):
        import_peft(model_of_adapted(), tmp_path)


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path):
    export_peft(model_of_adapted(), tmp_path / "real")
    (tmp_path / "linked").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "linked" / name).symlink_to(tmp_path / "real" / name)
    with pytest.raises(TrainingError, match="symbolic link"):
        import_peft(model_of(), tmp_path / "linked")


def test_a_generator_of_ones_own_takes_part_beside_adapters(tmp_path):
    "The participants of the contract are any; adapters are one among them."
    model = model_of_adapted()
    generator = torch.Generator().manual_seed(1)
    contract = Contract(adapters=AdapterState(model), draws=NamedGenerator(generator))
    with CheckpointStore(tmp_path) as store:
        published = store.save(contract, step=0)
        expected = torch.rand(3, generator=generator)
        store.restore(contract)
    assert torch.equal(torch.rand(3, generator=generator), expected)
    with open_checkpoint(published.path) as saved:
        assert set(saved.tree) == {"adapters", "draws"}


def test_names_of_layers_are_names_and_no_patterns(tmp_path):
    def odd() -> nn.ModuleDict:
        torch.manual_seed(3)
        return nn.ModuleDict({name: nn.Linear(3, 3) for name in ("a[0]", "a0", "b*", "b", "bc", "?")})

    model = odd()
    adapt(model, LoraConfig(rank=1, targets=("a[[]0]", "b[*]", "[?]")), seed=0)
    assert list(lora_layers(model)) == ["a[0]", "b*", "?"]
    export_peft(drawn(model), tmp_path)
    fresh = odd()
    config = import_peft(fresh, tmp_path)
    assert bits(fresh) == bits(model)
    again = odd()
    adapt(again, config, seed=0)
    assert list(lora_layers(again)) == ["a[0]", "b*", "?"]


@pytest.mark.parametrize("odd", ["forward hook", "parametrized", "encoder", "a class of its own"])
def test_a_file_for_a_layer_that_cannot_be_adapted_is_refused_with_the_model_unchanged(tmp_path, odd):
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    adapt(plain, LoraConfig(rank=1, targets=("*",)), seed=0)
    files = peft_files(plain)
    if odd == "encoder":
        name = "0.layers.0.linear1"
        from safetensors.torch import save
        files["adapter_model.safetensors"] = save({f"base_model.model.{name}.lora_A.weight": torch.ones(1, 8),
                                                   f"base_model.model.{name}.lora_B.weight": torch.ones(16, 1)})
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    model = ODD[odd]()
    trainable = n_trainable(model)
    with pytest.raises(LoraError, match="expected"):
        import_peft(model, tmp_path, allow_other_base=True)
    assert not lora_layers(model) and n_trainable(model) == trainable


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_that_a_base_cannot_hold_are_told_and_those_that_it_can_are_not(tmp_path, dtype):
    model = model_of_adapted()
    with torch.no_grad():
        for layer in lora_layers(model).values():
            layer.lora_A.fill_(0.5)
            layer.lora_B.fill_(0.25)
        export_peft(model, tmp_path / "held")
        layer.lora_A[0, :3] = 1 / 3
        layer.lora_B[0, 0] = 1e30
        export_peft(model, tmp_path / "rounded")
    with warnings.catch_warnings(action="error"):
        import_peft(model_of().to(dtype), tmp_path / "held", allow_other_base=True)
        import_peft(model_of(), tmp_path / "rounded")
    narrow = model_of().to(dtype)
    with pytest.warns(UserWarning, match=rf"4 of 384 numbers of the adapters are rounded, torch\.float32 to {dtype}"):
        import_peft(narrow, tmp_path / "rounded", allow_other_base=True)
    refusing = model_of().to(dtype)
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning):
        import_peft(refusing, tmp_path / "rounded", allow_other_base=True)
    assert not lora_layers(refusing)  # a warning that was made an error left nothing behind


def test_whatever_else_trains_is_not_left_out_of_the_files_silently():
    model = model_of_adapted()
    model.norm.weight.requires_grad_(True)
    with pytest.raises(LoraError, match=r'of which the adapters alone train, got "norm\.weight" as well'):
        peft_files(model)
    model.norm.weight.requires_grad_(False)
    peft_files(model)


def test_a_base_whose_running_means_have_moved_is_told_apart_and_the_remedy_works(tmp_path):
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = copy.deepcopy(plain)
    adapt(model, LoraConfig(rank=1, targets=("0",)), seed=0)
    drawn(model.train())(torch.arange(12.0).reshape(4, 3))
    export_peft(model, tmp_path)
    with pytest.raises(LoraError, match=r"with the buffers \(running means\) that it had in the end"):
        import_peft(copy.deepcopy(plain), tmp_path)
    plain[1].load_state_dict(model[1].state_dict())
    import_peft(plain, tmp_path)
    assert bits(plain) == bits(model)
