"""Recovery: a run that was stopped or killed goes on as the same run, and another experiment is refused by name."""

import hashlib
import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fault_tolerant_transformer_lab.checkpoint_file import diff, open_checkpoint, read_manifest, state_digest
from fault_tolerant_transformer_lab.config import (
    OPERATION_FIELDS,
    ExperimentConfig,
    canonical_json,
    config_fields,
    load_config,
    shipped_config,
)
from fault_tolerant_transformer_lab.contract import CheckpointMismatchError, walk
from fault_tolerant_transformer_lab.publication import CheckpointStore, NoCheckpointError
from fault_tolerant_transformer_lab.training import RunResult, TrainingRun, deterministic, train

TINY = ExperimentConfig(
    vocab_size=32, block_size=8, d_model=16, n_heads=2, n_layers=1, dropout=0.1, seed=2712, steps=4, batch_size=2,
    learning_rate=3e-3, checkpoint_every=2, weight_decay=0.1, grad_clip=1.0, grad_accumulation=2,
    schedule={"kind": "cosine", "warmup_steps": 2, "horizon": 40, "floor": 0.1},
)


def run(config: ExperimentConfig, folder: Path, **options) -> RunResult:
    "Train with one thread and without a bar; runs of one test process then share their environment."
    with deterministic(threads=1):
        return train(config, folder, progress_bar=False, **options)


def files(folder: Path) -> dict[str, str]:
    "Every file of a run folder but its lock, with a digest of its content."
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}


def final_state(result: RunResult) -> dict[str, object]:
    "Every tensor and every plain value of the last checkpoint, read from its file."
    with open_checkpoint(result.directory / result.checkpoint) as saved:
        return {repr(path): leaf.load() if hasattr(leaf, "load") else leaf for path, leaf in walk(saved.tree)}


# The restart


def test_checkpoint_restart_matches_uninterrupted_training(tmp_path):
    direct = run(TINY, tmp_path / "direct")
    stopped = run(TINY, tmp_path / "recovered", stop_after_step=2)
    recovered = run(TINY, tmp_path / "recovered", resume="must")

    assert (stopped.steps, stopped.finished, recovered.resumed_from) == (2, False, 2)
    assert direct.steps == recovered.steps == 4
    assert direct.tokens == recovered.tokens == 4 * 2 * 2 * 8
    expected, found = final_state(direct), final_state(recovered)
    assert expected.keys() == found.keys() and sum(isinstance(leaf, torch.Tensor) for leaf in expected.values()) > 40
    for path, leaf in expected.items():
        if isinstance(leaf, torch.Tensor):
            torch.testing.assert_close(found[path], leaf, rtol=0, atol=0)
        else:
            assert found[path] == leaf, path
    assert direct.state_digest == recovered.state_digest
    assert diff(direct.directory / direct.checkpoint, recovered.directory / recovered.checkpoint) == []
    assert (tmp_path / "direct/metrics.jsonl").read_bytes() == (tmp_path / "recovered/metrics.jsonl").read_bytes()


@pytest.mark.parametrize("stops", [(1,), (3,), (1, 2, 3), (2, 2, 4)])
def test_every_chain_of_stops_gives_the_same_run(tmp_path, stops):
    direct = run(TINY, tmp_path / "direct")
    for step in stops:
        assert run(TINY, tmp_path / "chain", stop_after_step=step).steps == step
    assert run(TINY, tmp_path / "chain").state_digest == direct.state_digest
    assert (tmp_path / "direct/metrics.jsonl").read_bytes() == (tmp_path / "chain/metrics.jsonl").read_bytes()


def test_a_run_of_real_text_in_bf16_across_an_epochs_end_resumes_exactly(tmp_path):
    (tmp_path / "text").mkdir()
    for name in "abc":
        (tmp_path / "text" / f"{name}.txt").write_text("the state of a run is more than its weights " * 3)
    config = TINY.replace(data=f"text:{tmp_path / 'text'}", tokenizer="byte", vocab_size=257, precision="bf16",
                          steps=24, eval_every=3, checkpoint_every=8)
    with deterministic():
        batches = TrainingRun(config).batches
    [last] = [step for step in range(24) if batches.epoch_of(step + 1) > batches.epoch_of(step) and step < 12]
    direct = run(config, tmp_path / "direct")
    for step in (last, last + 1):  # before and after the step in which an epoch ends
        run(config, tmp_path / "recovered", stop_after_step=step)
    assert run(config, tmp_path / "recovered").state_digest == direct.state_digest
    assert (tmp_path / "direct/metrics.jsonl").read_bytes() == (tmp_path / "recovered/metrics.jsonl").read_bytes()


@pytest.mark.parametrize("lost", ["optimizer", "progress", "rng"])
def test_the_comparison_fails_without_any_one_of_the_participants(tmp_path, lost):
    direct = run(TINY, tmp_path / "direct")
    run(TINY, tmp_path / "stopped", stop_after_step=2)
    with deterministic(threads=1):
        again = TrainingRun(TINY)
        torch.manual_seed(1)  # a new process draws from another place
        kept = [name for name in again.contract.participants if name != lost]
        CheckpointStore(tmp_path / "stopped/checkpoints").restore(again.contract, only=kept)
        for _ in range(2):
            again.advance()
        found = state_digest(again.contract.capture())
    assert found != direct.state_digest


# Identity

CHANGES = {
    "vocab_size": 40, "block_size": 4, "d_model": 32, "n_heads": 4, "n_layers": 2, "dropout": 0.2, "seed": 1,
    "batch_size": 3, "learning_rate": 1e-2, "data": None, "tokenizer": None, "weight_decay": 0.2, "betas": (0.9, 0.99),
    "grad_clip": None, "schedule.kind": "constant", "schedule.warmup_steps": 1, "schedule.horizon": 41,
    "schedule.floor": 0.2, "grad_accumulation": 1, "precision": "bf16", "ema_decay": 0.9,
}
OPERATIONS = {"steps": 6, "checkpoint_every": 1, "keep_last": 1, "eval_every": 1, "log_every": 2,
              "checkpoint_mode": "async", "on_save_error": "continue"}


def configurations(field: str, folder: Path) -> tuple[ExperimentConfig, ExperimentConfig]:
    "A configuration, and one in which this field is another; a few fields can only change together with others."
    if field == "schedule.kind":
        return TINY, TINY.replace(**{"schedule.kind": "constant", "schedule.horizon": None, "schedule.floor": 0.0})
    tokens, text = folder / "tokens.bin", folder / "text.txt"
    np.arange(4000, dtype=np.uint16).__mod__(200).tofile(tokens)
    text.write_text("a recovery contract " * 100)
    base = TINY.replace(vocab_size=257, data=f"tokens:{tokens}", tokenizer="byte")
    if field == "data":
        return base, base.replace(data=f"text:{text}")
    if field == "tokenizer":
        return base, base.replace(tokenizer="none")
    return TINY, TINY.replace(**{field: CHANGES[field]})


IDENTITY = [field.name for field in config_fields() if field.mark.role == "identity"]


@pytest.mark.parametrize("field", IDENTITY)
def test_checkpoint_rejects_configuration_drift(tmp_path, field):
    assert set(CHANGES) == set(IDENTITY), "every identity field is tried"
    config, changed = configurations(field, tmp_path)
    folder = tmp_path / "run"
    run(config, folder, stop_after_step=2)
    before = files(folder)

    with pytest.raises(CheckpointMismatchError, match=rf"{re.escape(field)}: checkpoint .*, requested ") as refusal:
        run(changed, folder)
    named = {drift.field.removeprefix("config.") for drift in refusal.value.fields}
    assert field in named
    if field not in ("schedule.kind", "data", "tokenizer"):
        assert {name for name in named if not name.startswith("data.")} == {field}
    assert files(folder) == before  # manifest, log and checkpoints

    with deterministic(threads=1):
        other = TrainingRun(changed)
        untouched = state_digest(other.contract.capture())
        with pytest.raises(CheckpointMismatchError):
            CheckpointStore(folder / "checkpoints").restore(other.contract)
        assert state_digest(other.contract.capture()) == untouched  # nothing was restored
    assert run(config, folder).state_digest == run(config, tmp_path / "direct").state_digest


@pytest.mark.parametrize("field", OPERATIONS)
def test_operation_may_change_at_a_resume(tmp_path, field):
    assert set(OPERATIONS) == set(OPERATION_FIELDS) - {"elastic"}, "every one is tried; elastic asks for ranks"
    changed = TINY.replace(**{field: OPERATIONS[field]})
    run(TINY, tmp_path / "run", stop_after_step=2)
    resumed = run(changed, tmp_path / "run", resume="must")
    direct = run(TINY.replace(steps=changed.steps), tmp_path / "direct")
    assert resumed.resumed_from == 2 and resumed.steps == changed.steps
    assert resumed.state_digest == direct.state_digest


def test_other_bytes_behind_the_same_name_are_another_experiment(tmp_path):
    text = tmp_path / "corpus.txt"
    text.write_text("the same name " * 100)
    config = TINY.replace(vocab_size=257, data=f"text:{text}", tokenizer="byte")
    run(config, tmp_path / "run", stop_after_step=2)
    moved = tmp_path / "moved.txt"
    moved.write_bytes(text.read_bytes())
    text.write_text("THE same name " * 100)
    with pytest.raises(CheckpointMismatchError, match="digest"):
        run(config, tmp_path / "run")
    assert run(config.replace(data=f"text:{moved}"), tmp_path / "run").finished  # where the bytes lie is no identity


CHILD = """
import sys
from fault_tolerant_transformer_lab.config import load_config
from fault_tolerant_transformer_lab.contract import CheckpointError
from fault_tolerant_transformer_lab.training import deterministic, train
config, folder, threads, allow = sys.argv[1:]
with deterministic(threads=int(threads)):
    try:
        print(train(load_config(config), folder, allow_environment_change=allow == "yes").steps)
    except CheckpointError as error:
        print(f"{type(error).__name__}: {error}")
"""


def in_child(config: ExperimentConfig, folder: Path, threads: int, allow: str = "no") -> str:
    "Train in a process of its own; what it printed."
    path = folder.with_suffix(".json")
    path.write_text(canonical_json(config.describe()))
    command = [sys.executable, "-c", CHILD, path, folder, str(threads), allow]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.strip()


def test_another_number_of_threads_is_refused_and_named(tmp_path):
    run(TINY, tmp_path / "run", stop_after_step=2)
    before = files(tmp_path / "run")
    said = in_child(TINY, tmp_path / "run", threads=2)
    assert said.startswith("EnvironmentMismatchError") and "threads: checkpoint 1, here 2" in said
    assert files(tmp_path / "run") == before
    assert in_child(TINY, tmp_path / "run", threads=2, allow="yes") == "4"
    lineage = read_manifest(tmp_path / "run/checkpoints/step-00000004.safetensors").lineage
    accepted = [str(change) for segment in lineage for change in segment.accepted_changes]
    assert accepted and all("threads" in change for change in accepted)  # nobody later calls this run exact


# Damage


def flip(path: Path, offset: int) -> None:
    "Change one bit of a file."
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("place", ["header", "tensor", "end"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_the_run_ends_equal(tmp_path, place):
    config = TINY.replace(steps=6)
    direct = run(config, tmp_path / "direct")
    run(config, tmp_path / "run", stop_after_step=4)
    newest = tmp_path / "run/checkpoints/step-00000004.safetensors"
    flip(newest, {"header": 100, "tensor": 6000, "end": newest.stat().st_size - 1}[place])
    recovered = run(config, tmp_path / "run")
    assert recovered.resumed_from == 2 and recovered.state_digest == direct.state_digest
    assert any("passed over step-00000004.safetensors" in note for note in recovered.notes)
    assert newest.with_name(newest.name + ".corrupt").exists()  # the evidence is kept
    assert (tmp_path / "direct/metrics.jsonl").read_bytes() == (tmp_path / "run/metrics.jsonl").read_bytes()


def test_a_run_whose_checkpoints_are_all_damaged_is_never_started_over(tmp_path):
    run(TINY, tmp_path / "run")
    for path in (tmp_path / "run/checkpoints").glob("*.safetensors"):
        flip(path, 6000)
    for _ in range(2):  # the second time the damaged ones may have been set aside
        with pytest.raises(NoCheckpointError) as refusal:
            run(TINY, tmp_path / "run")
        assert not refusal.value.empty


# SIGKILL at random moments

FORGE = """
import json, os, random, signal, sys, time
import torch._dynamo, torch._inductor.config  # what the first optimizer would import, once for all attempts
from fault_tolerant_transformer_lab.config import load_config
from fault_tolerant_transformer_lab.training import deterministic, train  # torch is imported, nothing has run in it

config, folder, kills, seed = load_config(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
draw, places, done = random.Random(seed), [], False

def attempt(report):
    def boundary(name, step):
        os.write(report, f"{name} {step}\\n".encode())
    with deterministic(threads=1):
        train(config, folder, on_boundary=boundary, progress_bar=False)

while not done:
    reading, report = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            attempt(report)
            status = 0
        finally:
            os._exit(status)
    os.close(report)
    seen = b""
    if len(places) < kills:
        events = draw.randrange(40) if draw.random() < 0.8 else 0  # the rest is killed while it starts or recovers
        while seen.count(b"\\n") < events and (part := os.read(reading, 1 << 16)):
            seen += part
        time.sleep(draw.uniform(0, 0.002 if events else 0.05))
        os.kill(child, signal.SIGKILL)
    while part := os.read(reading, 1 << 16):
        seen += part
    os.close(reading)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        places.append(seen.decode().splitlines()[-1] if seen else "starting")
    else:
        done = True
        assert os.WEXITSTATUS(status) == 0, "a run raised an error"
print(json.dumps(places))
"""


def test_a_run_killed_at_random_moments_ends_as_the_uninterrupted_one(tmp_path):
    config = TINY.replace(steps=300, checkpoint_every=3, eval_every=5)
    direct = run(config, tmp_path / "direct")
    (tmp_path / "config.json").write_text(canonical_json(config.describe()))
    seed = random.SystemRandom().randrange(2**32)
    command = [sys.executable, "-c", FORGE, tmp_path / "config.json", tmp_path / "killed", "30", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (seed, done.stderr)
    places = json.loads(done.stdout)
    assert len(places) == 30 and len({place.split()[0] for place in places}) >= 3, places

    result = json.loads((tmp_path / "killed/result.json").read_text())
    assert result["state_digest"] == direct.state_digest, (seed, places)
    assert result["finished"] and result["steps"] == 300 and result["tokens"] == 300 * 32
    log = (tmp_path / "killed/metrics.jsonl").read_bytes()
    assert log == (tmp_path / "direct/metrics.jsonl").read_bytes(), (seed, places)
    assert [json.loads(line)["step"] for line in log.splitlines()] == list(range(1, 301))
    assert not [path for path in (tmp_path / "killed").rglob("*.tmp")]


KILLED = """
import os, signal, sys
from fault_tolerant_transformer_lab.config import load_config
from fault_tolerant_transformer_lab.training import deterministic, train
def strike(name, step):
    if (name, step) == ("during_write", 2):
        os.kill(os.getpid(), signal.SIGKILL)
with deterministic(threads=1):
    train(load_config(sys.argv[1]), sys.argv[2], on_boundary=strike)
"""


def test_a_run_killed_before_its_first_checkpoint_starts_again_and_says_so(tmp_path):
    (tmp_path / "config.json").write_text(canonical_json(TINY.describe()))
    command = [sys.executable, "-c", KILLED, tmp_path / "config.json", tmp_path / "run"]
    assert subprocess.run(command, timeout=300).returncode == -signal.SIGKILL
    assert (tmp_path / "run/metrics.jsonl").read_bytes().count(b"\n") == 2
    with pytest.raises(NoCheckpointError):
        run(TINY, tmp_path / "run", resume="must")
    again = run(TINY, tmp_path / "run")
    assert again.resumed_from is None and again.interruptions == 1
    assert any("training begins at step 0" in note and "2 lines" in note for note in again.notes)
    assert again.state_digest == run(TINY, tmp_path / "direct").state_digest


# The state of a larger system

CHAIN = """
import os, signal, sys
import torch._dynamo, torch._inductor.config
from fault_tolerant_transformer_lab.config import load_config
from fault_tolerant_transformer_lab.publication import Disk
from fault_tolerant_transformer_lab.training import deterministic, train
config, folder = load_config(sys.argv[1]), sys.argv[2]

class Striking(Disk):
    "Kills the process at the first operation of a name on files whose names begin so."
    def __init__(self, operation, begin):
        super().__init__()
        self.strikes = (operation, begin)
    def operation(self, name, path, call):
        if self.strikes == (name, path.name[:len(self.strikes[1])]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().operation(name, path, call)

for place in sys.argv[3:]:
    name, _, where = place.partition("@")
    if not (child := os.fork()):
        disk = None if where.isdigit() else Striking(name, where)
        def strike(boundary, step):
            if disk is None and (boundary, step) == (name, int(where)):
                os.kill(os.getpid(), signal.SIGKILL)
        with deterministic(threads=1):
            train(config, folder, on_boundary=strike, disk=disk, progress_bar=False)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("mode", ["sync", "async", "overlapped"])
def test_three_kills_in_a_chain_leave_the_full_state_bitwise_equal(tmp_path, mode):
    "The shipped experiment, on the first part of its text, so that an epoch ends within the run."
    from pydoc_data.topics import topics  # what `data: pydoc` reads

    (tmp_path / "text.txt").write_text("".join(topics[name] for name in sorted(topics))[:21_000])
    config = load_config(shipped_config("pydoc-full-state")).replace(
        data=f"text:{tmp_path / 'text.txt'}", checkpoint_mode=mode)
    with deterministic():
        batches = TrainingRun(config).batches
    [last] = [step for step in range(1, 12) if batches.epoch_of(step) > batches.epoch_of(step - 1)]
    assert 6 < last < 12  # between the saves that the second kill and the end leave
    direct = run(config.replace(checkpoint_mode="sync"), tmp_path / "direct")

    path = tmp_path / "config.json"
    path.write_text(canonical_json(config.describe()))
    places = ["fsync@.step-00000006",  # while the second checkpoint is written
              "replace@.manifest.json",  # within the recovery from that: restored, and no step done yet
              f"after_update@{last}"]  # at the epoch's end, in a run that replays the steps of the first
    command = [sys.executable, "-c", CHAIN, path, tmp_path / "killed", *places]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["-9"] * 3, done.stderr
    recovered = run(config, tmp_path / "killed")
    newest = last // 3 * 3
    assert recovered.resumed_from in ([newest] if mode == "sync" else [newest - 3, newest])
    assert recovered.state_digest == direct.state_digest
    assert diff(direct.directory / direct.checkpoint, recovered.directory / recovered.checkpoint) == []
    assert (tmp_path / "direct/metrics.jsonl").read_bytes() == (tmp_path / "killed/metrics.jsonl").read_bytes()
    manifest = json.loads((tmp_path / "killed/manifest.json").read_text())
    assert manifest["starts"] == [0, 3, recovered.resumed_from]  # the second was killed before it could sign
    rows = [json.loads(line) for line in (tmp_path / "killed/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "ema_validation_loss" in row] == [4, 8, 12]
