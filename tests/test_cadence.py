"""When a run saves and is evaluated: by its own measurements, on one process and on several, and no bit changes."""

import json
import os
import signal
import time

import pytest

from fault_tolerant_transformer_lab import cli, training
from fault_tolerant_transformer_lab.config import ConfigError, ExperimentConfig, parse_value
from fault_tolerant_transformer_lab.distributed import run_ranks
from fault_tolerant_transformer_lab.equivalence import prove_training
from fault_tolerant_transformer_lab.launch import Place, outlive_launcher, prove_distributed, train_rank
from fault_tolerant_transformer_lab.lora import compare_tuning
from fault_tolerant_transformer_lab.publication import step_of
from fault_tolerant_transformer_lab.sharded import RankStore
from fault_tolerant_transformer_lab.training import deterministic, train

PLAIN = ExperimentConfig(vocab_size=32, block_size=8, d_model=16, n_heads=2, n_layers=1, dropout=0.0, seed=2712,
                         steps=12, batch_size=2, learning_rate=3e-3, checkpoint_every=5, grad_accumulation=2,
                         keep_last=99)
AUTO = PLAIN.replace(checkpoint_every="auto")


def run(config, folder, **options):
    "Train with one thread and without a bar."
    with deterministic(threads=1):
        return train(config, folder, progress_bar=False, **options)


def saved_in(folder):
    "The steps of a run's checkpoints."
    return sorted(step_of(path.name) for path in (folder / "checkpoints").glob("step-*.safetensors"))


def rows_of(folder):
    "The lines of a run's log."
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_auto_is_an_operation_and_other_texts_are_refused():
    assert AUTO.fingerprint() == PLAIN.fingerprint() and parse_value("checkpoint_every", "auto") == "auto"
    assert ExperimentConfig(**AUTO.describe()) == AUTO
    for wrong in ("Auto", 0, 2.0, True, None, "4"):
        with pytest.raises(ConfigError, match='checkpoint_every: expected an integer of at least 1, or "auto"') as told:
            PLAIN.replace(checkpoint_every=wrong)
        assert len(told.value.problems) == 1


@pytest.mark.parametrize("mode", ["sync", "async", "overlapped"])
def test_a_run_that_chooses_when_to_save_begins_with_step_1_and_ends_with_the_same_bits(tmp_path, mode):
    chosen = run(AUTO.replace(checkpoint_mode=mode), tmp_path / "auto")
    assert chosen.state_digest == run(PLAIN, tmp_path / "plain").state_digest
    saved = saved_in(tmp_path / "auto")
    gaps = [b - a for a, b in zip([0, *saved], saved, strict=False)]
    assert saved[0] == 1 and saved[-1] == 12
    assert all(later <= 2 * earlier for earlier, later in zip(gaps, gaps[1:], strict=False))  # it grows by doubling
    assert [note for note in chosen.notes if note.startswith("checkpoint_every=auto: ")]


def test_a_run_that_chooses_is_killed_and_goes_on_as_the_same(tmp_path):
    def _strike(name, step):
        if (name, step) == ("after_update", 9):
            os.kill(os.getpid(), signal.SIGKILL)

    if not (child := os.fork()):
        run(AUTO, tmp_path / "killed", on_boundary=_strike)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    last = run(AUTO, tmp_path / "killed")
    assert last.resumed_from is not None and last.state_digest == run(PLAIN, tmp_path / "plain").state_digest


def test_a_choice_follows_from_what_was_measured(tmp_path, monkeypatch):
    seen = []

    def _choose(account, **options):
        seen.append((sum(attempt.entries["stalled"] for attempt in account.attempts), options["current"]))
        return original(account, **options)

    from fault_tolerant_transformer_lab import interval, training

    original = interval.auto_interval
    monkeypatch.setattr(training, "auto_interval", _choose)
    run(AUTO.replace(steps=3), tmp_path)
    assert seen[:2] == [(0, None), (1, 1)]  # before anything is known, then after the save of step 1


def test_what_goes_by_where_a_run_saves_refuses_to_let_it_choose(tmp_path, capsys):
    for refused in (lambda: prove_training(AUTO), lambda: compare_tuning(AUTO),
                    lambda: prove_distributed(AUTO, "ddp", 2, [[Place((0,), "after_update", 2)]]),
                    lambda: outlive_launcher(AUTO, tmp_path / "x", "ddp", 2)):
        with pytest.raises(ConfigError, match="checkpoint_every: expected a number of steps for a "):
            refused()
    (tmp_path / "auto.json").write_text(json.dumps(AUTO.describe()))
    for more in ([], ["--nproc", "2"]):
        assert cli.main(["prove", "--config", str(tmp_path / "auto.json"), *more]) == 2
        assert "fttl: checkpoint_every: expected a number" in capsys.readouterr().err


@pytest.mark.parametrize(("parallel", "mode"), [("ddp", "sync"), ("fsdp", "async")])
def test_ranks_choose_together_when_to_save_and_are_evaluated_as_one_process(tmp_path, parallel, mode):
    config = AUTO.replace(eval_every=4, log_every=5, checkpoint_mode=mode)
    digests = run_ranks(lambda ranks: train_rank(config, tmp_path / "two", ranks, parallel=parallel).state_digest, 2)
    plain = run_ranks(lambda ranks: train_rank(PLAIN, tmp_path / "plain", ranks, parallel=parallel).state_digest, 2)
    assert digests == plain
    run(PLAIN.replace(eval_every=4, log_every=5), tmp_path / "one")
    two, one = rows_of(tmp_path / "two"), rows_of(tmp_path / "one")
    for row in two + one:
        del row["grad_norm"]  # FSDP2 adds the parts of a norm in another order, and no limit uses it here
    assert two == one  # the validation losses too, to the last bit
    assert [row["step"] for row in rows_of(tmp_path / "one") if "validation_loss" in row] == [4, 8, 12]
    assert any(note.startswith("checkpoint_every=auto: ") for note in json.loads(
        (tmp_path / "two" / "result.json").read_text())["notes"])


def test_ranks_plan_with_the_time_that_a_write_in_the_background_takes(tmp_path, monkeypatch):
    "A save that waits for the one before it would stall training, so the interval may not be shorter than a write."
    def _run(ranks):
        seen = []
        monkeypatch.setattr(training, "auto_interval", lambda account, **options: seen.append(options) or original(
            account, **options))
        slow = RankStore._write
        monkeypatch.setattr(RankStore, "_write", lambda *arguments: time.sleep(0.3) or slow(*arguments))
        train_rank(AUTO.replace(checkpoint_mode="async", steps=4), tmp_path, ranks, parallel="ddp")
        return [options["commit_delay"] for options in seen]

    original = training.auto_interval
    first, second = run_ranks(_run, 2)
    assert second == [] and first[0] == 0.0 and all(0.3 <= known < 30 for known in first[2:]) and len(first) > 2, first


def test_an_evaluation_is_the_same_at_every_number_of_ranks(tmp_path):
    found = set()
    config = PLAIN.replace(grad_accumulation=3, steps=2, eval_every=2)
    for size in (1, 2, 3):
        run_ranks(lambda ranks, n=size: train_rank(config, tmp_path / str(n), ranks, parallel="elastic").steps, size)
        found.add(rows_of(tmp_path / str(size))[-1]["validation_loss"])
    assert len(found) == 1
