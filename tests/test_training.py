"""Training: the loop's arithmetic, its boundaries, its log, its signals, and what it refuses."""

import dataclasses
import errno
import hashlib
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fault_tolerant_transformer_lab.checkpoint_file import diff, open_checkpoint, state_digest, verify
from fault_tolerant_transformer_lab.config import ConfigError, ExperimentConfig, canonical_json, load_config
from fault_tolerant_transformer_lab.contract import (
    Contract,
    ContractError,
    EnvironmentMismatchError,
    RandomGenerators,
    environment_identity,
)
from fault_tolerant_transformer_lab.model import Transformer
from fault_tolerant_transformer_lab.publication import (
    CheckpointLockedError,
    CheckpointStore,
    Disk,
    NoCheckpointError,
    PublicationError,
    RecordingDisk,
)
from fault_tolerant_transformer_lab.training import (
    BOUNDARIES,
    Interrupted,
    NonFiniteLossError,
    RunResult,
    TrainingError,
    TrainingRun,
    clip_gradients,
    deterministic,
    known_row,
    learning_rate_at,
    make_optimizer,
    reconcile,
    tokens_per_step,
    train,
)

ROOT = Path(__file__).parents[1]
SMOKE = load_config(ROOT / "configs" / "smoke.json")
TINY = ExperimentConfig(vocab_size=32, block_size=8, d_model=16, n_heads=2, n_layers=1, dropout=0.1, seed=2712, steps=4,
                        batch_size=2, learning_rate=3e-3, checkpoint_every=2)


def run(config: ExperimentConfig, folder: Path | str, **options) -> RunResult:
    "Train with one thread and without a bar; runs of one test process then share their environment."
    with deterministic(threads=1):
        return train(config, folder, **{"progress_bar": False} | options)


def files(folder: Path) -> dict[str, str]:
    "Every file of a run folder but its lock, with a digest of its content."
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}


def log_of(folder: Path) -> list[dict]:
    "The rows of a run's log."
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# The learning rate


@given(peak=st.floats(1e-6, 10), warmup=st.integers(0, 50), length=st.integers(1, 100), floor=st.floats(0, 1),
       step=st.integers(0, 10**12))
def test_the_learning_rate_rises_to_the_peak_and_never_leaves_its_bounds(peak, warmup, length, floor, step):
    config = TINY.replace(learning_rate=peak, schedule={"kind": "cosine", "warmup_steps": warmup,
                                                        "horizon": warmup + length, "floor": floor})
    rate = learning_rate_at(config, step)
    assert 0 <= rate <= peak * (1 + 1e-12)
    if step >= warmup:
        assert rate >= peak * floor * (1 - 1e-12) and rate >= learning_rate_at(config, step + 1) - 1e-12
    elif step:
        assert rate > learning_rate_at(config, step - 1)
    if step >= warmup + length:
        assert math.isclose(rate, peak * floor, abs_tol=1e-12)


@given(steps=st.integers(1, 10**6), step=st.integers(0, 100))
def test_the_learning_rate_does_not_know_how_long_the_run_is(steps, step):
    config = TINY.replace(schedule={"kind": "cosine", "warmup_steps": 5, "horizon": 50, "floor": 0.1})
    assert learning_rate_at(config.replace(steps=steps), step) == learning_rate_at(config, step)


def test_the_rate_of_a_step_is_the_one_that_its_update_used(tmp_path):
    config = TINY.replace(schedule={"kind": "constant", "warmup_steps": 3})
    run(config, tmp_path)
    assert [row["learning_rate"] for row in log_of(tmp_path)] == pytest.approx([1e-3, 2e-3, 3e-3, 3e-3], rel=1e-12)
    with deterministic(threads=1):
        trainer = TrainingRun(config)
        for row in log_of(tmp_path):
            trainer.advance()
            assert {group["lr"] for group in trainer.optimizer.param_groups} == {row["learning_rate"]}


# The optimizer


def test_matrices_decay_and_biases_and_gains_do_not():
    with deterministic():
        model = Transformer.from_config(SMOKE)
    decaying, spared = make_optimizer(model, SMOKE.replace(weight_decay=0.3)).param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert (decaying["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    assert all(names[p].endswith("weight") and p.ndim == 2 for p in decaying["params"])
    assert all(names[p].endswith("bias") or "norm" in names[p] for p in spared["params"])
    assert sorted(map(id, decaying["params"] + spared["params"])) == sorted(map(id, model.parameters()))


def test_parameters_without_a_gradient_are_left_out_and_fused_falls_back():
    with deterministic():
        model = Transformer.from_config(SMOKE)
    model.token_embedding.weight.requires_grad_(False)
    parameters = [p for group in make_optimizer(model, SMOKE).param_groups for p in group["params"]]
    assert len(parameters) == sum(p.requires_grad for p in model.parameters()) == 27
    unfused = make_optimizer(nn.Linear(2, 2).to("meta"), SMOKE)  # no fused kernel there
    assert isinstance(unfused, torch.optim.AdamW)


def test_the_update_is_adamws_by_hand():
    config = SMOKE.replace(weight_decay=0.1, learning_rate=0.01)
    with deterministic(threads=1):
        trainer = TrainingRun(config)
        before = {name: p.detach().double() for name, p in trainer.model.named_parameters()}
        trainer.advance()
    for name, p in trainer.model.named_parameters():
        gradient = p.grad.double()
        # The first step's bias-corrected moments are the gradient and its square.
        decay = 0.1 if p.ndim >= 2 else 0.0
        expected = before[name] * (1 - 0.01 * decay) - 0.01 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=2e-6)


# The step


def test_the_steps_loss_is_the_mean_over_its_micro_batches(tmp_path):
    config = TINY.replace(dropout=0.0, grad_accumulation=4)
    with deterministic(threads=1):
        trainer = TrainingRun(config)
        losses = []
        for batch in trainer.batches.batch(0):
            logits = trainer.model(batch.inputs_BT).log_softmax(-1)
            losses.append(-logits.gather(-1, batch.targets_BT[..., None]).mean().item())
        assert trainer.advance() == pytest.approx(sum(losses) / 4, rel=1e-6)
    assert tokens_per_step(config) == trainer.progress.tokens_seen == 4 * 2 * 8


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bf16_rounds_the_forward_pass_and_keeps_weights_and_loss_in_float32(precision):
    with deterministic(threads=1):
        trainer = TrainingRun(TINY.replace(precision=precision))
        kinds = []
        trainer.model.blocks[0].attention.qkv.register_forward_hook(lambda *args: kinds.append(args[2].dtype))
        trainer.advance()
    assert kinds == [torch.bfloat16 if precision == "bf16" else torch.float32]
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_clipping_shortens_to_the_limit_and_reports_the_length_before():
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert clip_gradients(model.parameters(), None).item() == 5.0
    assert clip_gradients(model.parameters(), 10.0).item() == 5.0
    assert model.weight.grad.tolist() == [[3.0, 4.0]]
    assert clip_gradients(model.parameters(), 1.0).item() == 5.0
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, 0.8]]))


def test_dropout_is_on_in_training_whatever_the_user_looked_at_before():
    with deterministic(threads=1):
        first, second = TrainingRun(TINY), TrainingRun(TINY)
    losses = []
    for trainer in (first, second):
        with deterministic(threads=1):
            RandomGenerators().seed(5)
            if trainer is second:
                trainer.model.eval()
            losses.append(trainer.advance())
    assert losses[0] == losses[1]


def test_the_batches_of_a_run_are_chained_into_its_state_and_named_in_its_log(tmp_path):
    config = TINY.replace(grad_accumulation=2)
    result = run(config, tmp_path)
    with deterministic():
        batches = TrainingRun(config).batches
    chain, rows = b"", log_of(tmp_path)
    for step, row in enumerate(rows):
        digest = b"".join(batch.digest() for batch in batches.batch(step))
        chain = blake3(chain + digest).digest()
        assert row["batch"] == blake3(digest).hexdigest()[:16]
    with open_checkpoint(tmp_path / result.checkpoint) as saved:
        assert saved.tree["progress"]["batch_digest"] == chain.hex()


# Determinism


def switches() -> tuple:
    "Everything global that a run touches."
    return (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_num_threads(), torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark,
            torch.utils.deterministic.fill_uninitialized_memory, os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes(),
            signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), torch.get_default_dtype(),
            torch.is_grad_enabled())


@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_a_run_leaves_no_global_switch_and_no_generator_changed(tmp_path, monkeypatch, workspace):
    if workspace:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    else:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = switches()
    run(TINY.replace(eval_every=1), tmp_path / "good")
    assert switches() == before
    with pytest.raises(NonFiniteLossError):
        run(TINY.replace(learning_rate=1e30), tmp_path / "bad")
    assert switches() == before


def test_the_runs_bits_do_not_depend_on_the_generators_it_finds(tmp_path):
    digests = set()
    for seed in (1, 2):
        with deterministic():
            RandomGenerators().seed(seed)
            digests.add(run(TINY, tmp_path / str(seed)).state_digest)
    assert len(digests) == 1


@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_determinism_sets_the_switches_of_cudnn_and_cublas(monkeypatch, workspace):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    if workspace:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    else:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = switches()
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (workspace or ":4096:8")
    assert switches() == before


def test_nested_determinism_puts_back_each_level():
    outside = switches()
    with deterministic(threads=1):
        middle = switches()
        with deterministic(threads=2):
            assert torch.get_num_threads() == 2
        assert switches() == middle and torch.get_num_threads() == 1
        facts = environment_identity()["decides"]
    assert switches() == outside
    assert facts["deterministic_algorithms"] is True and facts["threads"] == 1


# The average of the weights


def test_the_average_is_that_of_the_formula_and_changes_no_update(tmp_path):
    config = TINY.replace(ema_decay=0.75)
    with deterministic(threads=1):
        plain = TrainingRun(TINY)
        losses = [plain.advance() for _ in range(5)]
        part = Contract(model=plain.model, optimizer=plain.optimizer, rng=RandomGenerators())
        before = state_digest(part.capture(5))
        averaged, by_hand = TrainingRun(config), None
        for loss in losses:
            assert averaged.advance() == loss
            weights = [p.detach().double() for p in averaged.model.parameters()]
            by_hand = weights if by_hand is None else [
                0.75 * old + 0.25 * new for old, new in zip(by_hand, weights, strict=True)]
        for expected, found in zip(by_hand, averaged.ema.module.parameters(), strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-7)
        part = Contract(model=averaged.model, optimizer=averaged.optimizer, rng=RandomGenerators())
        assert state_digest(part.capture(5)) == before


def test_the_average_is_saved_and_resumed_and_its_loss_is_logged(tmp_path):
    config = TINY.replace(ema_decay=0.9, eval_every=2)
    direct = run(config, tmp_path / "direct")
    for step in (1, 2, 3):
        run(config, tmp_path / "stopped", stop_after_step=step)
    resumed = run(config, tmp_path / "stopped")
    assert resumed.state_digest == direct.state_digest and log_of(tmp_path / "direct") == log_of(tmp_path / "stopped")
    with open_checkpoint(direct.directory / direct.checkpoint) as saved, deterministic(threads=1):
        assert saved.tree["ema"]["n_averaged"].load() == 4
        trainer = TrainingRun(config)
        trainer.model.load_state_dict({name.removeprefix("module."): tensor.load()
                                       for name, tensor in saved.tree["ema"].items() if name != "n_averaged"})
        assert trainer.evaluate() == log_of(tmp_path / "direct")[-1]["ema_validation_loss"]
    assert [row["step"] for row in log_of(tmp_path / "direct") if "ema_validation_loss" in row] == [2, 4]
    with deterministic(threads=1):  # without it the resumed run is another one
        trainer = TrainingRun(config)
        trainer.advance()
        names = [name for name in trainer.contract.participants if name != "ema"]
        run(config, tmp_path / "half", stop_after_step=2)
        CheckpointStore(tmp_path / "half/checkpoints").restore(trainer.contract, only=names)
        trainer.advance(), trainer.advance()
        assert state_digest(trainer.contract.capture()) != direct.state_digest


# The device


def test_a_device_that_is_not_here_is_refused_before_anything_is_made(tmp_path):
    words = {"cuda:99": "expected one of the [0-9]+ GPUs"}
    for name in ("cuda:99", "tpu", "meta", "mps", "", "cpu;"):
        with pytest.raises(TrainingError, match=f"device: {words.get(name, 'expected cpu, cuda')}.*got {name!r}"):
            run(TINY, tmp_path / "run", device=name)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and auto takes it")
def test_auto_is_the_cpu_where_there_is_no_gpu(tmp_path):
    results = [run(TINY, tmp_path / name, device=name) for name in ("cpu", "auto")]
    assert results[0].state_digest == results[1].state_digest
    with pytest.raises(TrainingError, match="0 GPUs .* finds here, got 'cuda'; use device='auto'"):
        run(TINY, tmp_path / "cuda", device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_gpu_resumes_exactly_and_is_not_continued_on_the_cpu_by_accident(tmp_path):
    config = TINY.replace(ema_decay=0.9, eval_every=2, precision="bf16")
    direct = run(config, tmp_path / "direct", device="cuda")
    run(config, tmp_path / "stopped", device="cuda", stop_after_step=2)
    with pytest.raises(EnvironmentMismatchError, match="devices"):
        run(config, tmp_path / "stopped")
    assert run(config, tmp_path / "stopped", device="cuda").state_digest == direct.state_digest


# The observer


def test_an_observer_sees_the_restored_contract_and_each_step_before_its_boundary(tmp_path):
    class Watching:
        def started(self, contract, step, run):
            assert run.contract is contract
            events.append(("started", step, contract.step, state_digest(contract.capture())))

        def completed(self, step, loss):
            events.append(("completed", step, loss))

    events = []
    stopped = run(TINY, tmp_path, stop_after_step=2)
    result = run(TINY, tmp_path, observer=Watching(),
                 on_boundary=lambda name, step: name == "after_update" and events.append((name, step)))
    assert [event[0] for event in events] == ["started", *["completed", "after_update"] * 2]
    assert events[0] == ("started", 2, 2, events[0][3])
    assert events[0][3] == stopped.state_digest
    assert [event[:2] for event in events[1:]] == [("completed", 3), ("after_update", 3), ("completed", 4),
                                                  ("after_update", 4)]
    assert events[3][2] == result.final_loss == log_of(tmp_path)[-1]["loss"]
    again = len(events)
    run(TINY, tmp_path, observer=Watching())
    assert len(events) == again  # nothing to do, nothing to see


# Evaluation and saving are operation


@pytest.mark.parametrize("field, value", [("eval_every", 1), ("eval_every", 3), ("checkpoint_every", 1),
                                          ("checkpoint_every", 9), ("keep_last", 1), ("log_every", 3),
                                          ("checkpoint_mode", "async"), ("checkpoint_mode", "overlapped"),
                                          ("on_save_error", "continue")])
def test_no_operation_changes_a_bit_of_training(tmp_path, field, value):
    direct = run(TINY, tmp_path / "direct")
    other = run(TINY.replace(**{field: value}), tmp_path / "other")
    assert other.state_digest == direct.state_digest
    assert diff(direct.directory / direct.checkpoint, other.directory / other.checkpoint) == []
    rows = log_of(tmp_path / "other")
    plain = [{key: value for key, value in row.items() if key != "validation_loss"} for row in rows]
    assert plain and plain == [row for row in log_of(tmp_path / "direct") if row["step"] in {r["step"] for r in rows}]


def test_the_validation_loss_is_that_of_the_step_and_in_its_line(tmp_path):
    config = TINY.replace(eval_every=2)
    run(config, tmp_path)
    rows = log_of(tmp_path)
    assert ["validation_loss" in row for row in rows] == [False, True, False, True]
    with deterministic(threads=1):
        trainer = TrainingRun(config)
        for row in rows:
            trainer.advance()
            if "validation_loss" in row:
                assert trainer.evaluate() == trainer.evaluate() == row["validation_loss"]


def test_evaluation_in_user_mode_leaves_modes_gradients_and_generators(tmp_path):
    with deterministic(threads=1):
        trainer = TrainingRun(TINY)
        trainer.advance()
        trainer.model.blocks[0].eval()
        modes = [module.training for module in trainer.model.modules()]
        gradients = [p.grad.clone() for p in trainer.model.parameters()]
        before = state_digest(trainer.contract.capture())
        trainer.model.blocks[0].register_forward_hook(lambda *_: torch.rand(()) and None)  # a metric that draws
        trainer.evaluate()
        assert [module.training for module in trainer.model.modules()] == modes
        assert all(torch.equal(a, p.grad) for a, p in zip(gradients, trainer.model.parameters(), strict=True))
        assert state_digest(trainer.contract.capture()) == before


def test_evaluation_without_a_validation_part_is_refused_at_the_start(tmp_path):
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "nine.bin")
    config = TINY.replace(data=f"tokens:{tmp_path / 'nine.bin'}")
    with deterministic(threads=1):
        trainer = TrainingRun(config)
    if trainer.validation is not None:
        pytest.skip("the data room holds a part out of nine tokens")
    with pytest.raises(TrainingError, match="too small to hold a validation part out"):
        trainer.evaluate()
    with pytest.raises(ConfigError, match="eval_every: expected 0, got 2"):
        run(config.replace(eval_every=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Boundaries


def test_boundaries_come_in_order_and_each_names_its_step(tmp_path):
    seen, recording = [], RecordingDisk()
    run(TINY.replace(steps=3), tmp_path, on_boundary=lambda name, step: seen.append((name, step)), disk=recording)
    in_step = ["before_forward", "after_backward", "after_update"]
    writes = [sum(place == ("during_write", step) for place in seen) for step in (1, 2, 3)]
    assert writes[0] == 0 and writes[1] >= 8 and writes[2] >= 8  # saves at 2 and, where the run ends, at 3
    expected = [(name, 1) for name in in_step]
    for step in (2, 3):
        expected += [(name, step) for name in in_step]
        expected += [("during_write", step)] * writes[step - 1] + [("after_publication", step)]
    assert seen == expected
    assert set(name for name, _ in seen) == set(BOUNDARIES)


def test_during_write_comes_before_every_disk_operation_of_a_save(tmp_path):
    events = []

    class Watching(RecordingDisk):
        def operation(self, name, path, call):
            events.append(f"{name} {path.name}")
            return super().operation(name, path, call)

    run(TINY.replace(steps=2), tmp_path, on_boundary=lambda name, step: events.append(name), disk=Watching())
    start = events.index("during_write")
    save = events[start:events.index("after_publication")]
    assert save[::2] == ["during_write"] * (len(save) // 2) and "during_write" not in save[1::2]
    assert save[1] == "fsync metrics.jsonl"
    replaced = next(i for i, event in enumerate(save) if event.startswith("replace"))
    assert save.index("fsync metrics.jsonl") < replaced  # no checkpoint is ahead of the log


def test_a_callback_that_raises_ends_the_run_and_the_next_one_goes_on(tmp_path):
    direct = run(TINY, tmp_path / "direct")
    for place in [("before_forward", 3), ("after_backward", 3), ("after_update", 4), ("during_write", 4),
                  ("after_publication", 4)]:
        def interrupt(name, step, place=place):
            if (name, step) == place:
                raise KeyboardInterrupt

        folder = tmp_path / place[0]
        with pytest.raises(KeyboardInterrupt):
            run(TINY, folder, on_boundary=interrupt)
        assert run(TINY, folder).state_digest == direct.state_digest
        assert (folder / "metrics.jsonl").read_bytes() == (tmp_path / "direct/metrics.jsonl").read_bytes()


# Non-finite


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_non_finite_loss_stops_before_the_update_and_keeps_the_checkpoints(tmp_path, value):
    run(TINY, tmp_path, stop_after_step=2)
    before = files(tmp_path / "checkpoints")
    trainers = []
    original = TrainingRun.__init__

    def remember(self, *args, **options):
        original(self, *args, **options)
        trainers.append(self)

    def poison(name, step):
        if (name, step) == ("before_forward", 4):
            with torch.no_grad():
                trainers[0].model.head.weight[0, 0] = value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "__init__", remember)
        with pytest.raises(NonFiniteLossError, match="step 4: expected a finite loss") as refusal:
            run(TINY, tmp_path, on_boundary=poison)
    assert refusal.value.step == 4 and not math.isfinite(refusal.value.value)
    assert files(tmp_path / "checkpoints") == before
    assert [row["step"] for row in log_of(tmp_path)] == [1, 2, 3]
    assert run(TINY, tmp_path).state_digest == run(TINY, tmp_path / "direct").state_digest


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_non_finite_gradient_is_found_although_the_loss_is_finite(clip):
    with deterministic(threads=1):
        trainer = TrainingRun(TINY.replace(grad_clip=clip))
        trainer.advance()
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.model.head.weight.register_hook(lambda gradient: gradient * math.inf)
        with pytest.raises(NonFiniteLossError, match="gradient norm") as refusal:
            trainer.advance()
    assert refusal.value.step == 2 and trainer.progress.step == 1
    assert all(torch.equal(a, p) for a, p in zip(before, trainer.model.parameters(), strict=True))
    assert {state["step"].item() for state in trainer.optimizer.state.values()} == {1}


def test_errors_survive_a_trip_between_processes():
    for error in (NonFiniteLossError(3, "loss", math.inf), Interrupted(15, Path("a/b"), 3), TrainingError("why")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301


# The log


def rows_of(n: int) -> bytes:
    "A log of n steps with a loss that is easily told apart."
    return b"".join(b'{"loss":%s,"step":%d}\n' % (repr(1 / s).encode(), s) for s in range(1, n + 1))


@settings(max_examples=200)
@given(n=st.integers(0, 12), restored=st.integers(0, 12), cut=st.integers(0, 400), garbage=st.binary(max_size=30))
def test_a_log_cut_anywhere_after_the_restored_step_comes_back_exactly(n, restored, cut, garbage):
    restored = min(restored, n)
    whole = rows_of(n)
    kept = rows_of(restored)
    found = whole[: len(kept) + cut] + garbage.replace(b"\n", b"")
    history = [1 / s for s in range(1, restored + 1)]
    log = reconcile(found, history, lambda s: {"step": s, "loss": 1 / s})
    assert (log.data, log.rebuilt) == (kept, ())
    assert reconcile(log.data, history, lambda s: {}) == dataclasses.replace(log, dropped=0)  # stays so


@settings(max_examples=200)
@given(n=st.integers(1, 8), cut=st.integers(1, 400))
def test_a_log_cut_before_the_restored_step_keeps_its_whole_lines_and_no_half_one(n, cut):
    whole = rows_of(n)
    found = whole[: max(0, len(whole) - cut)]
    complete = found[: found.rfind(b"\n") + 1]
    log = reconcile(found, [1 / s for s in range(1, n + 1)], lambda s: {"step": s, "loss": 1 / s})
    assert log.data.startswith(complete) and log.rebuilt == tuple(range(complete.count(b"\n") + 1, n + 1))
    assert [json.loads(line)["step"] for line in log.data.splitlines()] == list(range(1, n + 1))


@settings(max_examples=200)
@given(data=st.one_of(st.binary(max_size=300), st.lists(st.sampled_from(rows_of(6).splitlines(keepends=True) + [
    b"\n", b"null\n", b"[1]\n", b'{"step":true,"loss":1.0}\n', b'{"step":2,"loss":9.0}\n', b'{"step":99,"loss":1}\n',
    b'{"step":1e0,"loss":1.0}\n', b"[" * 5000 + b"\n", b"\xff\xfe\n"])).map(b"".join)),
       every=st.integers(1, 3))
def test_whatever_the_log_holds_each_due_step_is_in_it_once_and_in_order(data, every):
    history = [1 / s for s in range(1, 7)]
    log = reconcile(data, history, lambda s: {"step": s, "loss": 1 / s}, lambda s: s % every == 0)
    rows = [json.loads(line) for line in log.data.splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)) and set(steps) >= set(range(every, 7, every)) and set(steps) <= set(range(1, 7))
    assert all(row["loss"] == history[row["step"] - 1] for row in rows)
    assert [row["step"] for row in rows if row.get("rebuilt")] == list(log.rebuilt)


def test_a_line_holds_only_what_two_runs_share(tmp_path):
    run(TINY, tmp_path / "a")
    run(TINY, tmp_path / "b")
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()
    assert set(log_of(tmp_path / "a")[0]) == {"step", "loss", "learning_rate", "grad_norm", "tokens_seen", "batch"}
    assert len({row["batch"] for row in log_of(tmp_path / "a")}) == 4


def test_a_lost_log_is_rebuilt_from_the_history_and_it_is_said(tmp_path):
    run(TINY, tmp_path, stop_after_step=2)
    whole = log_of(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    result = run(TINY, tmp_path)
    rows = log_of(tmp_path)
    assert [(row["step"], row.get("rebuilt")) for row in rows] == [(1, True), (2, True), (3, None), (4, None)]
    known = ("step", "loss", "learning_rate", "tokens_seen")
    for before, after in zip(whole, rows[:2], strict=True):
        assert after == {key: before[key] for key in known} | {"rebuilt": True}
    assert any("expected the lines of 2 restored steps, 2 were missing" in note for note in result.notes)


def test_a_log_of_another_run_does_not_pass_for_this_one(tmp_path):
    run(TINY, tmp_path / "a", stop_after_step=2)
    run(TINY.replace(seed=3), tmp_path / "b")
    (tmp_path / "a/metrics.jsonl").write_bytes((tmp_path / "b/metrics.jsonl").read_bytes())
    result = run(TINY, tmp_path / "a")
    assert [row.get("rebuilt") for row in log_of(tmp_path / "a")] == [True, True, None, None]
    assert any("contradicted the checkpoint" in note for note in result.notes)


def test_the_cadence_of_the_log_may_change_at_a_resume(tmp_path):
    config = TINY.replace(steps=6)
    run(config.replace(log_every=2), tmp_path, stop_after_step=4)
    assert [row["step"] for row in log_of(tmp_path)] == [2, 4]
    result = run(config.replace(log_every=3), tmp_path)
    assert [row["step"] for row in log_of(tmp_path)] == [2, 4, 6]  # nothing was due between
    assert not any("metrics.jsonl" in note for note in result.notes)


@pytest.mark.parametrize("cadences", [(2, 1), (1, 2), (2, 3, 1), (1, 4, 2), (3, 1, 2)])
def test_a_log_of_several_cadences_is_whole_and_each_missing_line_is_found(tmp_path, cadences, caplog):
    config = TINY.replace(steps=6, checkpoint_every=1, keep_last=9)
    ends = (2, 4, 6)[-len(cadences):]
    for every, end in zip(cadences, ends, strict=True):
        result = run(config.replace(log_every=every), tmp_path, stop_after_step=end)
    starts = (0, *ends[:-1])
    due = [step for every, start, end in zip(cadences, starts, ends, strict=True)
           for step in range(start + 1, end + 1) if step % every == 0]
    assert [row["step"] for row in log_of(tmp_path)] == due and not caplog.records
    assert not any("metrics.jsonl" in note for note in result.notes)
    for other in range(1, 5):  # a call without work misses nothing either
        assert not any("metrics.jsonl" in note for note in run(config.replace(log_every=other), tmp_path).notes)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for missing in range(len(due)):
        (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines[:missing] + lines[missing + 1:]))
        (note,) = [note for note in run(config, tmp_path).notes if "metrics.jsonl" in note]
        assert f"1 were missing or contradicted the checkpoint (the first: step {due[missing]})" in note
        assert [row["step"] for row in log_of(tmp_path)] == due


def test_a_manifest_without_cadences_is_read_as_if_the_cadence_had_not_changed(tmp_path):
    config = TINY.replace(log_every=2)
    run(config, tmp_path, stop_after_step=2)
    path = tmp_path / "manifest.json"
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key != "cadences"}
    path.write_text(json.dumps(kept))
    result = run(config, tmp_path)
    assert result.interruptions == 1 and not any("metrics.jsonl" in note for note in result.notes)
    manifest = json.loads(path.read_text())
    assert (manifest["starts"], manifest["cadences"]) == ([0, 2], [2, 2])


def test_a_log_goes_back_with_its_run_across_a_change_of_cadence(tmp_path):
    config = TINY.replace(steps=6, checkpoint_every=1, keep_last=9)
    run(config.replace(log_every=2), tmp_path, stop_after_step=4)
    run(config, tmp_path)
    back = run(config.replace(log_every=3), tmp_path, resume_from=2)
    assert [row["step"] for row in log_of(tmp_path)] == [2, 3, 6]
    assert not any("were missing" in note for note in back.notes)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["starts"], manifest["cadences"]) == ([0, 4, 2], [2, 1, 3])


def test_a_symlinked_log_is_not_followed(tmp_path):
    run(TINY, tmp_path / "run", stop_after_step=2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes((tmp_path / "run/metrics.jsonl").read_bytes())
    (tmp_path / "run/metrics.jsonl").unlink()
    (tmp_path / "run/metrics.jsonl").symlink_to(elsewhere)
    content = elsewhere.read_bytes()
    with pytest.raises(TrainingError, match="run/metrics.jsonl: expected a regular file, found a symbolic link"):
        run(TINY, tmp_path / "run")
    assert elsewhere.read_bytes() == content


def test_a_log_with_a_second_name_is_written_anew_and_the_other_name_keeps_its_bytes(tmp_path):
    run(TINY, tmp_path / "run", stop_after_step=2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.hardlink_to(tmp_path / "run/metrics.jsonl")
    content = elsewhere.read_bytes()
    run(TINY, tmp_path / "run")
    assert elsewhere.read_bytes() == content
    assert [row["step"] for row in log_of(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["metrics.jsonl", "manifest.json", "result.json"])
@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")],
                         ids=["fifo", "directory", "link to a device"])
def test_what_is_no_file_in_a_run_folder_is_refused_at_once(tmp_path, name, plant):
    run(TINY, tmp_path)
    (tmp_path / name).unlink()
    plant(tmp_path / name)
    with pytest.raises(TrainingError, match=f"{name}: expected a regular file, found (a symbolic link|something else)"):
        run(TINY, tmp_path)


# The run folder


def test_the_manifest_is_there_before_the_first_step_and_the_result_at_the_end(tmp_path):
    seen = []

    def look(name, step):
        if (name, step) == ("before_forward", 1):
            seen.append(sorted(p.name for p in tmp_path.iterdir()))
            seen.append(json.loads((tmp_path / "manifest.json").read_text()))

    result = run(TINY, tmp_path, on_boundary=look)
    names, manifest = seen
    assert names == ["checkpoints", "ledger.jsonl", "manifest.json", "metrics.jsonl"]
    assert set(manifest) == {"config", "fingerprint", "identity", "parameters", "environment", "versions", "starts",
                             "cadences"}
    assert ExperimentConfig(**manifest["config"]) == TINY and manifest["fingerprint"] == TINY.fingerprint()
    assert manifest["environment"]["decides"]["threads"] == 1
    assert manifest["versions"]["torch"] == str(torch.__version__) and manifest["versions"]["numpy"] == np.__version__
    written = json.loads((tmp_path / "result.json").read_text())
    assert written == json.loads(json.dumps(result.to_plain()))
    assert (written["steps"], written["tokens"], written["resumed_from"]) == (4, 64, None)
    losses = [row["loss"] for row in log_of(tmp_path)]
    assert (written["initial_loss"], written["final_loss"]) == (losses[0], losses[-1])
    assert verify(tmp_path / written["checkpoint"]).state_digest == written["state_digest"]
    assert str(tmp_path) not in (tmp_path / "result.json").read_text() + (tmp_path / "manifest.json").read_text()


def test_starts_and_interruptions_count_every_call_that_trained(tmp_path):
    run(TINY, tmp_path, stop_after_step=1)
    run(TINY, tmp_path, stop_after_step=2)
    result = run(TINY, tmp_path)
    assert result.interruptions == 2 and json.loads((tmp_path / "manifest.json").read_text())["starts"] == [0, 1, 2]
    assert run(TINY, tmp_path).interruptions == 2


def test_a_finished_run_changes_nothing_but_says_so_and_writes_the_result(tmp_path):
    first = run(TINY, tmp_path)
    (tmp_path / "result.json").unlink()
    before = files(tmp_path)
    again = run(TINY, tmp_path)
    assert again.notes[-1] == "nothing to do: step 4 was asked for, and the run is at step 4"
    assert (again.state_digest, again.steps, again.finished, again.resumed_from) == (first.state_digest, 4, True, 4)
    after = files(tmp_path)
    assert after.pop("result.json") and after == before
    past = run(TINY.replace(steps=3), tmp_path)
    assert past.steps == 4 and past.finished and "the run is at step 4" in past.notes[-1]


def test_a_call_without_work_leaves_the_result_of_the_one_that_did_it(tmp_path):
    run(TINY, tmp_path, stop_after_step=2)
    first = run(TINY, tmp_path)
    kept = (tmp_path / "result.json").read_bytes()
    for options in ({}, {"resume": "must"}, {"stop_after_step": 1}, {"resume_from": 4}):
        again = run(TINY, tmp_path, **options)
        assert "nothing to do" in again.notes[-1] and (tmp_path / "result.json").read_bytes() == kept
    assert json.loads(kept)["resumed_from"] == 2 and json.loads(kept)["elapsed_seconds"] == first.elapsed_seconds


@pytest.mark.parametrize("spoil", [
    lambda plain: plain | {"steps": 3}, lambda plain: plain | {"state_digest": "0" * 64},
    lambda plain: plain | {"finished": False}, lambda plain: plain | {"interruptions": 0},
    lambda plain: {name: value for name, value in plain.items() if name != "notes"}, lambda plain: [plain]])
def test_a_result_that_is_damaged_or_of_another_state_is_written_again(tmp_path, spoil):
    run(TINY, tmp_path, stop_after_step=2)
    run(TINY, tmp_path)
    path = tmp_path / "result.json"
    path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    again = run(TINY, tmp_path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(again.to_plain()))
    path.write_bytes(path.read_bytes()[:-9])
    assert json.loads(json.dumps(run(TINY, tmp_path).to_plain())).keys() == json.loads(path.read_text()).keys()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"starts": "0"}', '{"starts": [true], "cadences": [1]}',
                                     "[" * 200_000, '{"starts": [0], "cadences": []}',
                                     '{"starts": [0], "cadences": [0]}'])
def test_a_manifest_that_is_not_ours_is_refused_with_a_remedy(tmp_path, content):
    run(TINY, tmp_path, stop_after_step=2)
    (tmp_path / "manifest.json").write_text(content)
    before = files(tmp_path / "checkpoints")
    with pytest.raises(TrainingError, match="move it away"):
        run(TINY, tmp_path)
    assert files(tmp_path / "checkpoints") == before
    (tmp_path / "manifest.json").unlink()
    assert run(TINY, tmp_path).finished


# Resume


def test_resume_never_refuses_a_folder_with_checkpoints_and_loses_nothing(tmp_path):
    run(TINY, tmp_path, resume="never", stop_after_step=2)
    before = files(tmp_path)
    with pytest.raises(TrainingError, match="found steps 2; nothing was changed"):
        run(TINY.replace(seed=5), tmp_path, resume="never")
    assert files(tmp_path) == before
    kept = tmp_path / "checkpoints/step-00000002.safetensors"
    kept.rename(kept.with_name(kept.name + ".corrupt"))
    with pytest.raises(TrainingError, match="some that were set aside"):
        run(TINY, tmp_path, resume="never")


def test_resume_must_refuses_to_begin_and_makes_no_folder(tmp_path):
    for options in ({"resume": "must"}, {"resume_from": 2}):
        with pytest.raises(NoCheckpointError, match="expected a checkpoint to resume from, found none") as refusal:
            run(TINY, tmp_path / "none", **options)
        assert refusal.value.empty and not (tmp_path / "none").exists()


@pytest.mark.parametrize("options, message", [
    ({"resume": "maybe"}, "resume: expected auto, never or must, got 'maybe'"),
    ({"resume": "never", "resume_from": 2}, "contradicts"),
    ({"stop_after_step": -1}, "stop_after_step: expected 1 or more, got -1"),
    ({"stop_after_step": 0}, "stop_after_step: expected 1 or more, got 0"),
])
def test_a_wish_that_makes_no_sense_is_refused(tmp_path, options, message):
    with pytest.raises(TrainingError, match=message):
        run(TINY, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_refusal_names_the_run_and_a_file_in_its_place(tmp_path):
    run(TINY, tmp_path / "run-A", stop_after_step=2)
    for options in ({"resume": "never"}, {"resume_from": 9}):
        with pytest.raises((TrainingError, NoCheckpointError), match="run-A/checkpoints"):
            run(TINY, tmp_path / "run-A", **options)
    (tmp_path / "output").write_text("a file")
    with pytest.raises(PublicationError, match="output is a file and not a directory: choose another directory"):
        run(TINY, tmp_path / "output")


def test_going_back_sets_later_checkpoints_aside_and_drops_their_lines(tmp_path):
    config = TINY.replace(keep_last=3, checkpoint_every=1)
    direct = run(config, tmp_path / "direct")
    run(config, tmp_path / "run")
    back = run(config, tmp_path / "run", resume_from=2, stop_after_step=3)
    assert (back.resumed_from, back.steps) == (2, 3) and [row["step"] for row in log_of(tmp_path / "run")] == [1, 2, 3]
    aside = sorted(p.name for p in (tmp_path / "run/checkpoints").glob("*.rewound"))
    assert aside == ["step-00000003.safetensors.rewound", "step-00000004.safetensors.rewound"]
    assert run(config, tmp_path / "run").state_digest == direct.state_digest


def test_going_back_in_another_experiment_moves_nothing(tmp_path):
    config = TINY.replace(keep_last=3, checkpoint_every=1)
    run(config, tmp_path)
    before = files(tmp_path)
    with pytest.raises(Exception, match="seed: checkpoint 2712, requested 1"):
        run(config.replace(seed=1), tmp_path, resume_from=2)
    with pytest.raises(NoCheckpointError):
        run(config, tmp_path, resume_from=9)
    assert files(tmp_path) == before


def test_a_relative_folder_stays_where_it_was_when_the_process_moves(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result = run(TINY, "run", on_boundary=lambda name, step: os.chdir(tmp_path / "there"))
    assert not list((tmp_path / "there").iterdir()) and result.directory == tmp_path / "here/run"
    assert {"manifest.json", "metrics.jsonl", "result.json"} <= set(files(tmp_path / "here/run"))


@pytest.mark.parametrize("place", [("after_update", 2), ("after_publication", 4), ("before_forward", 1)])
@pytest.mark.parametrize("then", ["moved", "deleted", "exchanged"])
def test_a_run_whose_folder_is_gone_says_so_and_leaves_nothing_in_its_place(tmp_path, place, then):
    folder = tmp_path / "run"

    def strike(name, step):
        if (name, step) == place:
            shutil.rmtree(folder) if then == "deleted" else folder.rename(tmp_path / "moved")
            if then == "exchanged":
                (folder / "checkpoints").mkdir(parents=True)

    with pytest.raises(TrainingError, match="run/ was moved or deleted while the run was writing"):
        run(TINY, folder, on_boundary=strike)
    assert [path.name for path in folder.rglob("*")] == (["checkpoints"] if then == "exchanged" else [])
    if then == "moved" and place[0] == "after_publication":
        assert not folder.exists() and run(TINY, tmp_path / "moved").steps == 4


def test_a_second_writer_is_refused_before_it_touches_anything(tmp_path):
    refused = []

    def second(name, step):
        if (name, step) == ("before_forward", 3):
            before = files(tmp_path)
            with pytest.raises(CheckpointLockedError):
                train(TINY, tmp_path, progress_bar=False)
            refused.append(files(tmp_path) == before)

    run(TINY, tmp_path, on_boundary=second)
    assert refused == [True]


# Faults of the disk


class FullDisk(Disk):
    "Fails one kind of operation on names that match, from the n-th time on."

    def __init__(self, name: str, pattern: str, nth: int):
        super().__init__()
        self.name, self.pattern, self.left = name, pattern, nth

    def operation(self, name, path, call):
        if name == self.name and re.search(self.pattern, path.name):
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().operation(name, path, call)


@pytest.mark.parametrize("name, pattern, nth", [
    ("append", "metrics", 2), ("fsync", "metrics", 1), ("write", "step-00000004", 0), ("fsync", "step-00000004", 0),
    ("create", "manifest", 0), ("create", "result", 0), ("replace", "step-00000004", 0)])
def test_a_full_disk_ends_the_run_loudly_and_the_next_call_goes_on(tmp_path, name, pattern, nth):
    direct = run(TINY, tmp_path / "direct")
    with pytest.raises(PublicationError, match="ENOSPC"):
        run(TINY, tmp_path / "run", disk=FullDisk(name, pattern, nth))
    for path in (tmp_path / "run/checkpoints").glob("step-*.safetensors"):
        verify(path)
    assert run(TINY, tmp_path / "run").state_digest == direct.state_digest
    assert (tmp_path / "direct/metrics.jsonl").read_bytes() == (tmp_path / "run/metrics.jsonl").read_bytes()


def test_a_short_write_of_the_log_is_completed(tmp_path):
    class Short(Disk):
        def operation(self, name, path, call):
            return super().operation(name, path, call.shortened(3) if name == "append" and len(call.data) > 3 else call)

    run(TINY, tmp_path / "direct")
    run(TINY, tmp_path / "run", disk=Short())
    assert (tmp_path / "direct/metrics.jsonl").read_bytes() == (tmp_path / "run/metrics.jsonl").read_bytes()


def test_state_that_cannot_be_saved_is_refused_at_the_save(tmp_path):
    def spoil(name, step):
        if (name, step) == ("after_update", 4):
            trainers[0].progress.state_dict = lambda: {"seen": {1, 2}}

    trainers = []
    original = TrainingRun.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "__init__", lambda self, *a, **k: trainers.append(self) or original(self, *a, **k))
        with pytest.raises(ContractError, match="seen"):
            run(TINY, tmp_path, on_boundary=spoil)
    assert run(TINY, tmp_path).resumed_from == 2


# Signals

SIGNALLED = """
import os, signal, sys
from fault_tolerant_transformer_lab.config import load_config
from fault_tolerant_transformer_lab.training import Interrupted, deterministic, train
config, folder, numbers = sys.argv[1], sys.argv[2], [int(n) for n in sys.argv[3].split(",")]
def strike(name, step):
    if (name, step) == ("after_backward", 3):
        for number in numbers:
            os.kill(os.getpid(), number)
if "nohup" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
try:
    with deterministic(threads=1):
        train(load_config(config), folder, on_boundary=strike)
except Interrupted as stopped:
    print(stopped)
    sys.exit(128 + stopped.signal)
except KeyboardInterrupt:
    print("at once")
    sys.exit(1)
"""


def signalled(folder: Path, *numbers: int, flags: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    "Run a child that sends itself signals in the middle of step 3."
    path = folder.with_suffix(".json")
    path.write_text(canonical_json(TINY.describe()))
    command = [sys.executable, "-c", SIGNALLED, path, folder, ",".join(str(int(n)) for n in numbers), *flags]
    return forked.run(command)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_saves_at_the_next_step_boundary(tmp_path, number):
    done = signalled(tmp_path / "run", number)
    assert done.returncode == 128 + number, done.stderr
    assert done.stdout.strip() == (
        f"{number.name} after step 3: saved as run/checkpoints/step-00000003.safetensors; "
        "resume='auto' (--resume auto), without resume_from (--resume-from), goes on from there")
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["steps"], result["finished"]) == (3, False)
    assert result["checkpoint"] == "checkpoints/step-00000003.safetensors"
    resumed = run(TINY, tmp_path / "run")
    assert resumed.resumed_from == 3 and resumed.state_digest == run(TINY, tmp_path / "direct").state_digest


def test_a_second_signal_stops_at_once(tmp_path):
    terminated = signalled(tmp_path / "term", signal.SIGTERM, signal.SIGTERM)
    assert terminated.returncode == -signal.SIGTERM and terminated.stdout == ""
    interrupted = signalled(tmp_path / "int", signal.SIGINT, signal.SIGINT)
    assert (interrupted.returncode, interrupted.stdout.strip()) == (1, "at once")
    for name in ("term", "int"):
        assert run(TINY, tmp_path / name).resumed_from == 2


def test_an_ignored_signal_stays_ignored(tmp_path):
    done = signalled(tmp_path / "run", signal.SIGINT, flags=("nohup",))
    assert done.returncode == 0 and json.loads((tmp_path / "run/result.json").read_text())["finished"]


def test_interrupted_is_raised_and_the_handlers_are_put_back(tmp_path):
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]

    class Terminating(Disk):
        def operation(self, name, path, call):
            if name == "write" and "step-00000002" in path.name and not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.SIGTERM)  # in the middle of a save, which is completed
            return super().operation(name, path, call)

    disk = Terminating()
    disk.sent = False
    with pytest.raises(Interrupted) as stopped:
        run(TINY, tmp_path, disk=disk)
    assert (stopped.value.signal, stopped.value.step, stopped.value.path.name) == (15, 2, "step-00000002.safetensors")
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    assert run(TINY, tmp_path).finished


def test_a_signal_before_the_first_step_saves_nothing_and_says_so(tmp_path):
    class Terminating(Disk):
        def operation(self, name, path, call):
            if name == "replace" and "manifest" in path.name:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().operation(name, path, call)

    with pytest.raises(Interrupted, match="no step was completed, so nothing was saved.*begins at step 0") as stopped:
        run(TINY, tmp_path, disk=Terminating())
    assert stopped.value.path is None and not list((tmp_path / "checkpoints").glob("step-*"))


def test_what_an_interruption_says_of_going_on_is_true(tmp_path):
    def stopped(folder, **options):
        with pytest.raises(Interrupted) as caught:
            run(TINY, folder, **options, on_boundary=lambda name, step: (name, step) == ("after_backward", 3)
                and os.kill(os.getpid(), signal.SIGTERM))
        return str(caught.value)

    said = {stopped(tmp_path / "a", resume="never")}
    with pytest.raises(TrainingError, match="found steps 2, 3"):  # the same call would not go on
        run(TINY, tmp_path / "a", resume="never")
    run(TINY, tmp_path / "b")
    said.add(stopped(tmp_path / "b", resume_from=2).replace("b/", "a/"))
    assert len(said) == 1 and "the same command" not in (text := said.pop())
    assert "saved as a/checkpoints/step-00000003.safetensors; resume='auto' (--resume auto)" in text
    results = [run(TINY, tmp_path / name, resume="auto") for name in "ab"]
    assert [r.resumed_from for r in results] == [3, 3] and results[0].state_digest == results[1].state_digest


def test_training_outside_the_main_thread_installs_no_handler(tmp_path):
    found = []
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    look = lambda name, step: found.append([signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)])  # noqa: E731
    results = []
    thread = threading.Thread(target=lambda: results.append(run(TINY, tmp_path, on_boundary=look)))
    thread.start()
    thread.join(120)
    assert results[0].finished and all(handlers == before for handlers in found)


# The progress bar


def test_the_bar_is_silent_where_stderr_is_no_terminal(tmp_path, capfd):
    run(TINY, tmp_path, progress_bar=None)
    assert capfd.readouterr() == ("", "")


def test_no_bar_is_made_where_none_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("fault_tolerant_transformer_lab.training.tqdm", None)  # making one takes a lock of all forks
    assert run(TINY, tmp_path, progress_bar=False).finished


def test_the_bar_shows_loss_rate_and_the_last_save(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run(TINY, tmp_path, stop_after_step=2, progress_bar=True)
    said = capfd.readouterr().err
    assert re.search(r"2/2 .*loss [0-9.]+, [0-9,]+ tokens/s, saved 2", said), said


# The artifact of the smoke run

ARTIFACT = ROOT / "artifacts" / "cpu-smoke"


def test_the_smoke_runs_artifact_is_reproduced(tmp_path):
    "What does not depend on the machine is equal; losses within a tolerance; bits only in the same environment."
    manifest, kept = (json.loads((ARTIFACT / name).read_text()) for name in ("manifest.json", "result.json"))
    assert manifest["config"] == SMOKE.describe()
    with deterministic(threads=manifest["environment"]["decides"]["threads"]):
        found = train(SMOKE, tmp_path, progress_bar=False)
        here = json.loads((tmp_path / "manifest.json").read_text())

    assert (found.steps, found.tokens, found.parameters) == (kept["steps"], kept["tokens"], kept["parameters"])
    assert (kept["steps"], kept["tokens"], kept["parameters"]) == (8, 512, 28_032)
    assert found.fingerprint == kept["fingerprint"] == manifest["fingerprint"] == SMOKE.fingerprint()
    assert here["identity"] == manifest["identity"]  # the data's digest too
    assert found.initial_loss == pytest.approx(kept["initial_loss"], abs=1e-4)  # other kernels round otherwise
    assert found.final_loss == pytest.approx(kept["final_loss"], abs=1e-3)
    if here["environment"]["decides"] == manifest["environment"]["decides"]:
        assert found.state_digest == kept["state_digest"]
        assert (found.initial_loss, found.final_loss) == (kept["initial_loss"], kept["final_loss"])


def test_known_rows_agree_with_what_a_run_logged(tmp_path):
    run(TINY, tmp_path)
    for row in log_of(tmp_path):
        assert known_row(TINY, row["step"], row["loss"]).items() <= row.items()
