"""The command line as a process: every command, every exit status, every documented error."""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from blake3 import blake3

from fault_tolerant_transformer_lab import __version__, cli

PACKAGE = Path(cli.__file__).parent
SMOKE = PACKAGE / "configs" / "smoke.json"
COMMANDS = ("train", "prove", "prove-script", "check-certificate", "verify", "inspect", "diff", "export", "import",
            "sample", "compare-tuning", "plan", "crashtest", "soak")
TEXT = {"data": "text:corpus.txt", "tokenizer": "byte", "vocab_size": 257, "block_size": 16, "d_model": 16,
        "n_heads": 2, "n_layers": 1, "dropout": 0.1, "seed": 3, "steps": 4, "batch_size": 2, "learning_rate": 1e-3,
        "checkpoint_every": 2}


STARTED: list[subprocess.Popen[str]] = []


def environment(**changes: str) -> dict[str, str]:
    """The variables of a child: one thread, a fixed width, and no Python settings of the test's own."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8", **changes}


def command(*arguments: object) -> list[str]:
    """The command line of `fttl` in this interpreter."""
    return [sys.executable, "-m", "fault_tolerant_transformer_lab", *map(str, arguments)]


def fttl(*arguments: object, cwd: Path | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run `fttl` as a process of its own, forked from one that has imported torch, and wait for it."""
    return forked.run(command(*arguments), cwd=cwd, env=environment(**changes))


def fresh(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `fttl` as a shell starts it, and wait for it."""
    return subprocess.run(command(*arguments), cwd=cwd, env=environment(), text=True, capture_output=True, timeout=900,
                          check=False)


def start(*arguments: object, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start `fttl` as a process of its own, which `none_is_left` ends where the test does not."""
    STARTED.append(subprocess.Popen(command(*arguments), cwd=cwd, env=environment(), text=True, stdout=subprocess.PIPE,
                                    stderr=subprocess.PIPE))
    return STARTED[-1]


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    """End what a test that failed would leave training for ever."""
    yield
    while STARTED:
        with STARTED.pop() as process:
            process.kill()


def assert_refused(done: subprocess.CompletedProcess[str], status: int, *words: str) -> str:
    """Assert that a process ended with `status` and one line on standard error that holds all `words`."""
    assert done.returncode == status, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("fttl: "), done.stderr
    for word in words:
        assert word in lines[0], done.stderr
    return lines[0]


def checkpoints(run: Path) -> list[Path]:
    """The published checkpoints of a run, the earliest first."""
    return sorted((run / "checkpoints").glob("step-*.safetensors"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the lock, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*"))
            if p.is_file() and "lock" not in p.name}


def flip(path: Path, position: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


def wait_for_checkpoint(process: subprocess.Popen[str], run: Path, seconds: float = 120.0) -> None:
    """Wait until a run that another process trains has published a checkpoint."""
    limit = time.monotonic() + seconds
    while not checkpoints(run):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "timed out"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished smoke run `A`, which no test changes."""
    folder = tmp_path_factory.mktemp("trained")
    done = fresh("train", "--config", SMOKE, "--output", "A", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "A.stdout").write_text(done.stdout)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the finished smoke run, to be changed."""
    return Path(shutil.copytree(trained / "A", tmp_path / "A"))


# Help, version, and what they cost


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_is_short_complete_and_fits(name: str | None) -> None:
    done = fttl(*([name] if name else []), "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert f"usage: fttl {name}" in done.stdout if name else all(each in done.stdout for each in COMMANDS)


def test_train_help_names_every_field_of_the_configuration() -> None:
    stdout = fttl("train", "--help").stdout
    for name in cli.config_flags().__annotations__:
        assert f"--{name.replace('_', '-')} " in stdout
    for flag in ("--config", "--output", "--resume ", "--resume-from", "--stop-after-step", "--threads",
                 "--allow-environment-change"):
        assert flag in stdout


def test_version() -> None:
    done = fresh("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"fttl {__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["verfy"],
                                       ["train", "--config", "missing.json", "--output", "x"]])
def test_torch_is_not_loaded_where_it_is_not_needed(arguments: list[str], tmp_path: Path) -> None:
    program = ("import sys; from fault_tolerant_transformer_lab import cli\n"
               "try: cli.main(sys.argv[1:])\n"
               "finally: print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=tmp_path, env=environment(), text=True,
                          capture_output=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


# Training


def test_train_writes_the_run_and_says_so(trained: Path) -> None:
    result = json.loads((trained / "A" / "result.json").read_text())
    assert (result["steps"], result["tokens"], result["parameters"]) == (8, 512, 28_032)
    assert [p.name for p in checkpoints(trained / "A")] == ["step-00000004.safetensors", "step-00000008.safetensors"]
    assert len((trained / "A" / "metrics.jsonl").read_text().splitlines()) == 8
    assert (trained / "A" / "manifest.json").exists()
    stdout = (trained / "A.stdout").read_text()
    for fact in ("8 steps", "512 tokens", "28,032 parameters", "step-00000008.safetensors", result["state_digest"]):
        assert fact in stdout


def test_stopped_and_resumed_is_bitwise_equal(trained: Path, tmp_path: Path) -> None:
    first = fttl("train", "--config", SMOKE, "--output", "B", "--stop-after-step", 4, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert json.loads((tmp_path / "B" / "result.json").read_text())["steps"] == 4
    second = fresh("train", "--config", SMOKE, "--output", "B", "--resume", "must", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "resumed from step 4" in second.stdout
    result = json.loads((tmp_path / "B" / "result.json").read_text())
    assert (result["steps"], result["tokens"], result["parameters"]) == (8, 512, 28_032)
    diff = fttl("diff", trained / "A", tmp_path / "B")
    assert (diff.returncode, diff.stderr) == (0, "")
    assert diff.stdout.splitlines()[-1] == "bitwise equal"
    assert (trained / "A" / "metrics.jsonl").read_bytes() == (tmp_path / "B" / "metrics.jsonl").read_bytes()


def test_train_smoke_is_a_command_of_its_own(trained: Path, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("fttl-train-smoke")
    start_it = [str(program)] if program.exists() else [
        sys.executable, "-c", "import sys; from fault_tolerant_transformer_lab.cli import train_smoke; "
        "sys.exit(train_smoke())"]
    done = subprocess.run([*start_it, "--config", str(SMOKE), "--output", "S"], cwd=tmp_path, env=environment(),
                          text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert fttl("diff", trained / "A", tmp_path / "S").stdout.splitlines()[-1] == "bitwise equal"
    wrong = subprocess.run([*start_it, "--output", "S"], cwd=tmp_path, env=environment(), text=True,
                           capture_output=True, timeout=60, check=False)
    assert wrong.returncode == 2 and wrong.stderr.startswith("fttl-train-smoke: ") and "--config" in wrong.stderr


def test_compare_tuning_is_a_command_of_its_own_too_and_writes_what_it_measured(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("fttl-compare-tuning")
    command = [program] if program.exists() else [
        sys.executable, "-c", "import sys; from fault_tolerant_transformer_lab.cli import compare_tuning; "
        "sys.exit(compare_tuning())"]
    given = ["--config", SMOKE, "--output", "F", "--rank", "2", "--alpha", "4", "--targets", "*.qkv", "--steps", "2",
             "--device", "cpu", "--threads", "1"]
    done = subprocess.run([*command, *given], cwd=tmp_path, env=environment(), text=True, capture_output=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "28,032 of 28,032" in done.stdout and "512 of 28,544" in done.stdout
    written = json.loads((tmp_path / "F").read_text())
    assert written["lora"] == {"rank": 2, "alpha": 4.0, "targets": ["*.qkv"]}
    assert written["environment"]["devices"] == "cpu" and written["environment"]["threads"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["F"]
    wrong = subprocess.run(command, cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=60,
                           check=False)
    assert wrong.returncode == 2 and wrong.stderr.startswith("fttl-compare-tuning: ") and "--config" in wrong.stderr


IDENTITY = {
    "learning_rate": "1e-3", "seed": "1", "dropout": "0.25", "batch_size": "2", "grad_accumulation": "2",
    "weight_decay": "0.1", "betas": "0.8,0.95", "grad_clip": "1.0", "precision": "bf16", "block_size": "8",
    "n_layers": "1", "n_heads": "2", "d_model": "64", "vocab_size": "32", "schedule.warmup_steps": "2",
}


def in_process(capsys: pytest.CaptureFixture[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `fttl` inside this process, which spares the start of another, and give what it wrote."""
    capsys.readouterr()
    status = cli.main(list(map(str, arguments)))
    wrote = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, status, wrote.out, wrote.err)


@pytest.mark.parametrize("field", IDENTITY)
def test_an_identity_field_refuses_to_resume_and_is_named(field, tmp_path, capsys) -> None:
    smoke = ["train", "--config", SMOKE, "--output", tmp_path / "run", "--threads", 1]
    assert in_process(capsys, *smoke, "--stop-after-step", 2).returncode == 0
    before = contents(tmp_path / "run")
    flag = f"--{field.replace('_', '-')}"
    done = in_process(capsys, *smoke, flag, IDENTITY[field])
    assert_refused(done, 2, f"{field}: checkpoint ", "requested ")
    assert contents(tmp_path / "run") == before


def test_operation_fields_may_change_and_the_run_is_extended(trained: Path, run: Path, tmp_path: Path) -> None:
    longer = fttl("train", "--config", SMOKE, "--output", run, "--steps", 10, "--checkpoint-every", 3,
                  "--keep-last", 5, "--log-every", 2)
    assert longer.returncode == 0, longer.stderr
    direct = fttl("train", "--config", SMOKE, "--output", tmp_path / "direct", "--steps", 10)
    assert direct.returncode == 0, direct.stderr
    assert fttl("diff", run, tmp_path / "direct").stdout.splitlines()[-1] == "bitwise equal"
    assert [p.name[5:13] for p in checkpoints(run)] == ["00000004", "00000008", "00000009", "00000010"]


def test_another_thread_count_is_refused_and_named_unless_allowed(run: Path) -> None:
    again = ["train", "--config", SMOKE, "--output", run, "--steps", 10]
    before = contents(run)
    assert_refused(fttl(*again, OMP_NUM_THREADS="2"), 2, "threads: checkpoint 1", "--allow-environment-change")
    assert_refused(fttl(*again, "--threads", 2), 2, "threads: checkpoint 1")
    assert contents(run) == before
    allowed = fttl(*again, "--allow-environment-change", OMP_NUM_THREADS="2")
    assert allowed.returncode == 0, allowed.stderr
    inspected = fttl("inspect", run).stdout
    assert re.search(r"accepted: .*threads=1 -> 2", inspected), inspected


def test_threads_flag_takes_the_place_of_the_variable(run: Path) -> None:
    done = fttl("train", "--config", SMOKE, "--output", run, "--steps", 9, "--threads", 1, OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr


def test_resume_never_and_must(run: Path, tmp_path: Path) -> None:
    before = contents(run)
    assert_refused(fttl("train", "--config", SMOKE, "--output", run, "--resume", "never"), 2, str(run.name), "never")
    assert contents(run) == before
    assert_refused(fttl("train", "--config", SMOKE, "--output", tmp_path / "none", "--resume", "must"), 2, "none")
    assert not (tmp_path / "none").exists()


def test_resume_from_goes_back_and_keeps_the_evidence(trained: Path, run: Path) -> None:
    done = fttl("train", "--config", SMOKE, "--output", run, "--resume-from", 4)
    assert done.returncode == 0, done.stderr
    assert "resumed from step 4" in done.stdout
    assert fttl("diff", trained / "A", run).returncode == 0
    assert [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith("step-00000008.safetensors.")]
    assert_refused(fttl("train", "--config", SMOKE, "--output", run, "--resume-from", 5), 2, "5")


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_a_signal_saves_and_the_run_goes_on_as_the_same(number, name, tmp_path: Path) -> None:
    long = ["train", "--config", SMOKE, "--steps", 1_000_000, "--checkpoint-every", 50]
    process = start(*long, "--output", "stopped", cwd=tmp_path)
    wait_for_checkpoint(process, tmp_path / "stopped")
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    saved = checkpoints(tmp_path / "stopped")[-1]
    assert_refused(subprocess.CompletedProcess([], process.returncode, stdout, stderr), 128 + number, name, saved.name)
    end = int(saved.name[5:13]) + 3
    for folder in ("stopped", "direct"):
        done = fttl(*long, "--output", folder, "--stop-after-step", end, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert fttl("diff", "stopped", "direct", cwd=tmp_path).stdout.splitlines()[-1] == "bitwise equal"
    steps = [json.loads(line)["step"] for line in (tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, end + 1))


def test_sigkill_then_the_same_command(tmp_path: Path) -> None:
    long = ["train", "--config", SMOKE, "--steps", 1_000_000, "--checkpoint-every", 5]
    process = start(*long, "--output", "killed", cwd=tmp_path)
    wait_for_checkpoint(process, tmp_path / "killed")
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    end = int(checkpoints(tmp_path / "killed")[-1].name[5:13]) + 7
    for folder in ("killed", "direct"):
        done = fttl(*long, "--output", folder, "--stop-after-step", end, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert fttl("diff", "killed", "direct", cwd=tmp_path).returncode == 0


def test_a_second_writer_is_refused_with_the_holder(tmp_path: Path) -> None:
    process = start("train", "--config", SMOKE, "--steps", 1_000_000, "--output", "run", cwd=tmp_path)
    try:
        wait_for_checkpoint(process, tmp_path / "run")
        second = fttl("train", "--config", SMOKE, "--steps", 1_000_000, "--output", "run", cwd=tmp_path)
        assert_refused(second, 2, str(process.pid))
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_a_loss_that_is_not_finite_is_a_failure_and_spares_the_checkpoints(tmp_path: Path) -> None:
    done = fttl("train", "--config", SMOKE, "--output", "run", "--learning-rate", "1e30", "--checkpoint-every", 1,
                cwd=tmp_path)
    assert_refused(done, 1, "finite", "step ")
    verified = fttl("verify", "run", cwd=tmp_path)
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.parametrize("flags", [[], ["--resume", "never"], ["--batch-size", "2", "--threads", "1"]])
def test_the_command_that_goes_on_is_true(flags: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    done = in_process(capsys, "train", "--config", SMOKE, "--output", "a run", "--stop-after-step", 2, *flags)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("to go on"))
    words = shlex.split(line.removeprefix("to go on"))
    assert words[0] == "fttl" and "--stop-after-step" not in words and "--resume" not in words
    assert in_process(capsys, *words[1:]).returncode == 0
    assert json.loads((tmp_path / "a run" / "result.json").read_text())["finished"] is True


def test_a_fallback_is_told_once(run: Path, capsys) -> None:
    newest = checkpoints(run)[-1]
    flip(newest, newest.stat().st_size - 7)
    done = in_process(capsys, "train", "--config", SMOKE, "--output", run, "--allow-environment-change")
    assert done.returncode == 0
    assert (done.stdout + done.stderr).count("passed over") == 1 and "passed over" in done.stderr


# Damage


@pytest.mark.parametrize("where", ["header", "data"])
def test_a_flipped_bit_is_found_and_training_falls_back(where: str, trained: Path, run: Path) -> None:
    newest = checkpoints(run)[-1]
    manifest = json.loads(fttl("inspect", newest, "--json").stdout)
    flip(newest, 3000 if where == "header" else newest.stat().st_size - 7)
    last = list(manifest["tensors"])[-1]
    for path in (newest, run / "checkpoints", run):
        assert_refused(fttl("verify", path), 1, newest.name, "header" if where == "header" else last)
    assert fttl("verify", checkpoints(run)[0]).returncode == 0
    done = fttl("train", "--config", SMOKE, "--output", run)
    assert done.returncode == 0, done.stderr
    assert newest.name in done.stderr and "resumed from step 4" in done.stdout
    assert fttl("diff", trained / "A", run).stdout.splitlines()[-1] == "bitwise equal"
    assert fttl("verify", run).returncode == 0
    assert list((run / "checkpoints").glob(newest.name + ".corrupt*"))


def test_a_folder_of_damaged_checkpoints_is_not_started_over(run: Path) -> None:
    for path in checkpoints(run):
        flip(path, 2000)
    assert_refused(fttl("train", "--config", SMOKE, "--output", run), 2, "step-0000000")
    done = fttl("verify", run, "--json")
    assert done.returncode == 1
    assert [row["intact"] for row in json.loads(done.stdout)] == [False, False]


def test_a_truncated_and_an_unknown_file(run: Path, tmp_path: Path) -> None:
    newest = checkpoints(run)[-1]
    os.truncate(newest, newest.stat().st_size - 1)
    assert_refused(fttl("verify", newest), 1, newest.name)
    assert_refused(fttl("inspect", newest), 1, newest.name)
    other = tmp_path / "notes.txt"
    other.write_text("not a checkpoint\n" * 1000)
    assert_refused(fttl("verify", other), 2, "notes.txt", "not a checkpoint of this lab")
    assert_refused(fttl("diff", other, checkpoints(run)[0]), 2, "notes.txt")


def test_inspect_reads_no_tensor(run: Path) -> None:
    newest = checkpoints(run)[-1]
    flip(newest, newest.stat().st_size - 1)
    assert fttl("inspect", newest).returncode == 0
    assert fttl("verify", newest).returncode == 1


def test_diff_reads_every_byte_unless_told_otherwise(run: Path, tmp_path: Path, capsys) -> None:
    """Equal digests in the headers are what was written, and not what lies there."""
    newest = checkpoints(run)[-1]
    other = tmp_path / "other.safetensors"
    shutil.copyfile(newest, other)
    assert in_process(capsys, "diff", newest, other).stdout.endswith("\nbitwise equal\n")
    flip(other, other.stat().st_size - 7)
    done = in_process(capsys, "diff", newest, other)
    assert done.stdout == ""
    assert_refused(done, 1, "other.safetensors", "digest")
    done = in_process(capsys, "diff", newest, other, "--headers-only")
    assert done.returncode == 0 and "bitwise" not in done.stdout
    assert done.stdout.endswith("\nequal by their recorded digests; bytes not read\n")
    assert json.loads(in_process(capsys, "diff", newest, newest, "--json").stdout)["bytes_verified"] is True
    done = in_process(capsys, "diff", checkpoints(run)[0], other, "--headers-only")  # of another step; still damaged
    assert done.returncode == 1 and done.stdout.endswith(" by what their headers record; bytes not read\n")
    found = json.loads(in_process(capsys, "diff", checkpoints(run)[0], other, "--headers-only", "--json").stdout)
    values = [place for place in found["differences"] if place["path"].startswith("model.")]
    assert not found["bytes_verified"] and len(values) > 10 and {place["max_abs"] for place in values} == {None}


@pytest.mark.parametrize(("outrun", "words"), [
    ("examined", ("verify",)), ("examined", ("inspect",)), ("examined", ("diff", "--json")),
    ("examined", ("sample", "--n-tokens", 1)), ("latest_of", ("inspect",)), ("latest_of", ("diff", "--json")),
    ("latest_of", ("sample", "--n-tokens", 1))])
def test_a_command_that_retention_outran_looks_again(
        run: Path, monkeypatch: pytest.MonkeyPatch, capsys, outrun: str, words: tuple[Any, ...]) -> None:
    (older, newest), elsewhere, ours = checkpoints(run), run / "elsewhere", getattr(cli, outrun)
    newest.rename(elsewhere)

    def slowly(path: Path, **options: Any) -> Any:  # its file is deleted before it is opened, or once it is chosen
        monkeypatch.setattr(cli, outrun, ours)
        chosen = ours(path, **options) if outrun == "latest_of" else None
        older.unlink()
        elsewhere.rename(newest)
        return chosen or ours(path, **options)

    monkeypatch.setattr(cli, outrun, slowly)
    done = in_process(capsys, words[0], *([run, run] if words[0] == "diff" else [run]), *words[1:])
    assert done.returncode == 0 and done.stderr == "", done.stderr
    told = {"sample": "", "inspect": older.name if outrun == "latest_of" else newest.name}.get(words[0], newest.name)
    assert told in done.stdout


def test_latest_is_the_highest_step_that_verifies(trained: Path, run: Path, capsys) -> None:
    older, newest = checkpoints(run)
    flip(newest, newest.stat().st_size - 7)
    shutil.copyfile(older, newest.with_name("step-00000099.safetensors"))  # whole, under another step's name
    done = in_process(capsys, "diff", run, checkpoints(trained / "A")[0])
    assert done.returncode == 0 and older.name in done.stdout.splitlines()[0]
    assert len(done.stderr.splitlines()) == 2 and done.stderr.count("fttl: warning: passed over ") == 2
    assert newest.name in done.stderr and "step-00000099" in done.stderr
    done = in_process(capsys, "sample", run, "--n-tokens", 1)
    assert done.returncode == 0 and done.stderr.count("passed over") == 2
    done = in_process(capsys, "inspect", run)  # the header of step 8 is sound; no more than that was read
    assert done.returncode == 0 and newest.name in done.stdout and "only the header was read" in done.stdout
    assert "step-00000099" in done.stderr and newest.name not in done.stderr
    for path in checkpoints(run):
        flip(path, 3000)
    assert_refused(in_process(capsys, "diff", run, run), 1, older.name, newest.name)


def test_verify_holds_the_name_against_the_step_and_tells_of_what_was_set_aside(run: Path, capsys) -> None:
    older, newest = checkpoints(run)
    newest.rename(newest.with_name("step-00000099.safetensors"))
    older.rename(older.with_name(older.name + ".rewound-2"))
    done = in_process(capsys, "verify", run)
    assert_refused(done, 1, "step-00000099.safetensors", "holds step 8")
    assert "set aside (rewound)" in done.stdout
    rows = json.loads(in_process(capsys, "verify", run, "--json").stdout)
    assert [row["intact"] for row in rows] == [False, None] and rows[1]["set_aside"] == "rewound"
    newest.with_name("step-00000099.safetensors").rename(newest)
    assert in_process(capsys, "verify", run).returncode == 0


def test_what_never_was_a_checkpoint_is_bad_input_and_damage_is_not(run: Path, tmp_path: Path, capsys) -> None:
    import torch
    from safetensors.torch import save_file

    newest = checkpoints(run)[-1]
    save_file({"weight": torch.zeros(500)}, tmp_path / "foreign.safetensors", metadata={"format": "pt"})
    torch.save({"weight": torch.zeros(500)}, tmp_path / "foreign.pt")
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to(newest)
    for path in (tmp_path / "foreign.safetensors", tmp_path / "foreign.pt", SMOKE, tmp_path / "empty",
                 tmp_path / "link", Path("/dev/null")):
        for arguments in (["verify", path], ["inspect", path], ["diff", path, newest], ["sample", path]):
            told = assert_refused(in_process(capsys, *arguments), 2, "not a checkpoint of this lab", path.name)
            assert "generation" not in told
    ours = tmp_path / "ours.safetensors"
    for damage in (lambda: flip(ours, 5), lambda: flip(ours, 20), lambda: os.truncate(ours, 40)):
        shutil.copyfile(newest, ours)
        damage()
        told = assert_refused(in_process(capsys, "verify", ours), 1, "ours.safetensors")
        assert "not a checkpoint" not in told
    newest.write_bytes(bytes(newest.stat().st_size))  # all zeros, under the name of a checkpoint
    assert_refused(in_process(capsys, "verify", newest), 1, newest.name)


def test_tensors_have_one_form_of_name(run: Path, capsys) -> None:
    newest = checkpoints(run)[-1]
    plain = json.loads(in_process(capsys, "inspect", newest, "--json").stdout)
    assert plain["tensors"]["optimizer.state.0.exp_avg"]["path"] == "optimizer.state[0].exp_avg"
    assert "optimizer.state[0].exp_avg" in in_process(capsys, "inspect", newest).stdout
    different = in_process(capsys, "diff", checkpoints(run)[0], newest).stdout
    assert "optimizer.state[0].exp_avg" in different and "optimizer.state.0" not in different
    with newest.open("r+b") as file:
        file.seek(-8000, os.SEEK_END)
        file.write(b"\x7f\x7e\x7d\x7c")
    told = assert_refused(in_process(capsys, "verify", newest), 1, "optimizer.state[")
    assert "optimizer.state." not in told


def test_each_side_of_a_difference_is_shortened() -> None:
    from fault_tolerant_transformer_lab.checkpoint_file import Difference

    row = cli.difference_row(Difference("a", "value", "left" + "x" * 60 + "end", "right" + "x" * 60 + "dne"))
    assert "'left" in row[1] and "'right" in row[1] and len(row[1]) <= 32
    assert cli.difference_row(Difference("a", "only in b", b=7))[1] == "only in b: 7"


# Verify, inspect, diff


def test_verify_takes_a_file_a_folder_and_a_run(trained: Path) -> None:
    run = trained / "A"
    for path, n_lines in ((checkpoints(run)[0], 1), (run / "checkpoints", 2), (run, 2)):
        done = fttl("verify", path)
        assert (done.returncode, done.stderr) == (0, "")
        assert [(" intact " in line) for line in done.stdout.splitlines()[2:]] == [True] * n_lines
    rows = json.loads(fttl("verify", run, "--json").stdout)
    assert [(row["step"], row["intact"]) for row in rows] == [(4, True), (8, True)]
    assert rows[-1]["state_digest"] == json.loads((run / "result.json").read_text())["state_digest"]


def test_inspect_prints_header_lineage_and_tensors(trained: Path) -> None:
    done = fttl("inspect", trained / "A")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines[1:])) <= 100
    assert any(re.fullmatch(r"model\.blocks\.1\.attention\.qkv\.weight +float32 +96x32 +12,288", line)
               for line in lines)
    assert any(re.fullmatch(r" +step +0 +started", line) for line in lines)
    plain = json.loads(fttl("inspect", trained / "A", "--json").stdout)
    assert (plain["schema_version"], plain["step"], plain["tokens_seen"]) == (1, 8, 512)
    assert plain["config"]["config"]["d_model"] == 32
    assert plain["tensors"]["model.blocks.0.attention.qkv.weight"]["shape"] == [96, 32]
    assert plain["bytes"] == checkpoints(trained / "A")[-1].stat().st_size


def test_inspect_shows_a_resume_in_the_lineage(tmp_path: Path) -> None:
    for stop in (4, 5):
        done = fttl("train", "--config", SMOKE, "--output", "B", "--stop-after-step", stop, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    stdout = fttl("inspect", "B", cwd=tmp_path).stdout
    log = [line.split() for line in stdout.partition("\nlineage\n")[2].splitlines()]
    first = json.loads(fttl("inspect", checkpoints(tmp_path / "B")[0], "--json").stdout)
    assert log[0][1:] == ["0", "started"]
    assert log[1][1:] == ["4", "resumed", "from", "state", first["state_digest"]]


def test_diff_lists_what_differs(trained: Path, tmp_path: Path) -> None:
    other = fttl("train", "--config", SMOKE, "--output", "C", "--seed", 5, cwd=tmp_path)
    assert other.returncode == 0, other.stderr
    done = fttl("diff", trained / "A", tmp_path / "C")
    assert (done.returncode, done.stderr) == (1, "")
    assert max(map(len, done.stdout.splitlines()[2:])) <= 100
    assert "model.blocks.0.attention.qkv.weight" in done.stdout and "bitwise equal" not in done.stdout
    plain = json.loads(fttl("diff", trained / "A", tmp_path / "C", "--json").stdout)
    assert plain["equal"] is False
    weight = next(d for d in plain["differences"] if d["path"] == "model.blocks.0.attention.qkv.weight")
    assert weight["kind"] == "value" and weight["max_abs"] > 0 and weight["max_ulp"] > 0 and 0 < weight["share"] <= 1


def test_diff_finds_one_flipped_mantissa_bit_that_was_saved(trained: Path, tmp_path: Path) -> None:
    """Two files that are each whole, with one bit between them, differ in one element by one ULP."""
    import torch

    from fault_tolerant_transformer_lab.checkpoint_file import encode
    from fault_tolerant_transformer_lab.contract import Contract

    model = torch.nn.Linear(3, 2)
    files = []
    for name in ("one", "two"):
        files.append(tmp_path / f"{name}.safetensors")
        with files[-1].open("xb") as file:
            for offset, chunk in encode(Contract(model=model).capture(step=1)).chunks():
                file.seek(offset)
                file.write(chunk)
        with torch.no_grad():
            model.weight.view(torch.int32)[1, 2] ^= 1
    done = fttl("diff", *files)
    assert done.returncode == 1
    row = next(line for line in done.stdout.splitlines() if line.startswith("model.weight"))
    assert row.split()[-2:] == ["1", "16.7%"]


# Sample


def test_sample_needs_no_data(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "text.json").write_text(json.dumps(TEXT))
    done = fttl("train", "--config", "text.json", "--output", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "corpus.txt").unlink()
    (tmp_path / "text.json").unlink()
    first = fttl("sample", "run", "--prompt", "the ", "--n-tokens", 20, "--seed", 1, cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.startswith("the ")
    again = fttl("sample", "run", "--prompt", "the ", "--n-tokens", 20, "--seed", 1, cwd=tmp_path, OMP_NUM_THREADS="2")
    other = fttl("sample", "run", "--prompt", "the ", "--n-tokens", 20, "--seed", 2, cwd=tmp_path)
    assert again.stdout == first.stdout != other.stdout
    assert "\x1b" not in first.stdout + other.stdout
    assert fttl("sample", "run", "--temperature", 0, cwd=tmp_path).returncode == 0


def test_sample_without_a_tokenizer_is_numbers(trained: Path) -> None:
    done = fttl("sample", trained / "A", "--prompt", "1 2 3", "--n-tokens", 5)
    numbers = [int(word) for word in done.stdout.split()]
    assert done.returncode == 0 and numbers[:3] == [1, 2, 3] and len(numbers) == 8 and max(numbers) < 64
    for prompt in ("hello", "64", "-1"):
        assert_refused(fttl("sample", trained / "A", f"--prompt={prompt}"), 2, "--prompt", "below 64")


# Prove


def test_prove_prints_one_table_and_keeps_its_runs(tmp_path: Path) -> None:
    (tmp_path / "two.json").write_text(json.dumps(json.loads(SMOKE.read_text()) | {"steps": 2, "checkpoint_every": 1}))
    done = fttl("prove", "--config", "two.json", "--output", "proof", "--jobs", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"2 steps a run, .* 1 thread, 2 at a time$", done.stdout.splitlines()[0])
    head = done.stdout.splitlines()[2].split()
    assert head[:4] == ["path", "boundary", "stopped", "replayed"]
    rows = [line for line in done.stdout.splitlines() if line.startswith("recovered ")]
    assert len(rows) > 10 and all(row.endswith(" equal") for row in rows)
    for boundary in ("before_forward", "after_backward", "after_update", "during_write", "after_publication"):
        assert any(boundary in row and "SIGKILL" in row for row in rows)
    proof = json.loads((tmp_path / "proof" / "proof.json").read_text())
    assert proof["verdict"] == "EQUIVALENT" and len(proof["rows"]) == len(rows) + 1
    assert_refused(fttl("prove", "--config", "two.json", "--output", "proof", cwd=tmp_path), 2, "proof", "empty")


def test_a_proof_that_finds_no_equivalence_is_status_1(tmp_path: Path) -> None:
    hot = SMOKE.read_text().replace('"steps": 8', '"steps": 3').replace("3e-4", "1e30")
    (tmp_path / "hot.json").write_text(hot)
    done = fttl("prove", "--config", "hot.json", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    proof = json.loads(done.stdout)
    assert proof["verdict"] == "ERROR" and "finite" in json.dumps(proof)


@pytest.mark.parametrize("batch_size", [2, pytest.param(8, marks=pytest.mark.long)])  # 8 as in the file
def test_the_full_state_experiment_is_proven_and_misses_whatever_is_left_out(tmp_path: Path, batch_size: int) -> None:
    "Dropout, accumulation, warm-up and cosine, clipping, an average, bf16 and evaluation at once."
    config = json.loads((PACKAGE / "configs" / "pydoc-full-state.json").read_text())
    (tmp_path / "experiment.json").write_text(json.dumps(config | {"batch_size": batch_size}))
    done = fttl("prove", "--config", "experiment.json", "--json", cwd=tmp_path)
    proof = json.loads(done.stdout)
    assert done.returncode == 0 and proof["verdict"] == "EQUIVALENT", done.stdout + done.stderr
    assert len(proof["rows"]) > 40
    places = " ".join(row["boundary"] for row in proof["rows"])
    assert all(f"step {place}" in places for place in ("1, step boundary", "2, step boundary", "4, in_evaluation",
                                                       "6, in_accumulation", "12, after_update"))
    left_out = {knockout["participant"]: knockout["outcome"] for knockout in proof["knockouts"]}
    assert left_out == dict.fromkeys(["model", "ema", "optimizer", "progress", "rng"], "caught")


def test_a_trainer_of_ones_own_is_proven_certified_and_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fault_tolerant_transformer_lab.equivalence import ExampleRun\n\n\n"
        "def make(directory, fault=''):\n    return ExampleRun(fault)\n")
    prove = ("prove", "--run", "mine:make", "--steps", 3, "--in-process")
    done = fttl(*prove, "--with", "fault=generator lost", "--html", "page.html", "--junit", "junit.xml", cwd=tmp_path)
    assert done.returncode == 1 and "suspect generator torch_cpu" in done.stdout
    assert "<html" in (tmp_path / "page.html").read_text() and "<failure" in (tmp_path / "junit.xml").read_text()
    assert fttl(*prove, "--certificate", "certificate.json", cwd=tmp_path).returncode == 0
    checked = fttl("check-certificate", "certificate.json", cwd=tmp_path)
    assert checked.returncode == 0 and checked.stdout.splitlines()[-1] == "confirmed"
    for arguments, told in (
        (("--run", "mine:nothing", "--steps", 2), "can be imported"), (("--run", "mine:make"), "--steps"),
        (("--steps", 2), "--steps: expected with --run"),
        (("--sign", "key.pem"), "--sign: expected with --certificate"),
        ((*prove[1:], "--with", "nothing"), "fttl: --with: expected NAME=VALUE, got nothing"),
        ((*prove[1:], "--html", "no/page.html"), "--html"),
        ((*prove[1:], "--mode", "inductive", "--certificate", "c.json"), "--certificate"),
        ((*prove[1:], "--point", "sigkill@2:after_update"), "points: expected stops by clean"),
    ):
        assert_refused(fttl("prove", *arguments, cwd=tmp_path), 2, told)
    assert_refused(fttl("check-certificate", "page.html", cwd=tmp_path), 2, "expected a certificate")


def test_a_run_that_does_not_repeat_itself_is_told_with_the_operation(tmp_path: Path) -> None:
    run = ("prove", "--run", "fault_tolerant_transformer_lab.equivalence:example_run", "--steps", 4)
    done = fttl(*run, "--with", "fault=not deterministic", "--locate-op", "--html", "page.html", "--junit", "junit.xml",
                cwd=tmp_path)
    assert done.returncode == 1 and "NONDETERMINISTIC" in done.stdout
    [told] = [line for line in done.stdout.splitlines() if line.startswith("  operation: ")]
    assert "step 3, operation " in told and "bernoulli" in told and " in model.2, called at " in told
    for name in ("page.html", "junit.xml"):
        assert "bernoulli" in (tmp_path / name).read_text()


def test_what_may_be_lost_how_often_and_where_are_flags(tmp_path: Path) -> None:
    run = ("prove", "--run", "fault_tolerant_transformer_lab.equivalence:example_run", "--steps", 5, "--in-process",
           "--with", "fault=average left out", "--json")
    first = json.loads(fttl(*run).stdout)
    done = fttl(*run, "--expendable", "run.average", "--interrupt-at", 2, "--interrupt-at", 3, "--resumes", 2)
    proof = json.loads(done.stdout)
    assert first["verdict"] == "NOT_EXERCISED" and "run.average" in first["reason"]
    assert done.returncode == 0 and [row["point"] for row in proof["rows"][1:]] == [
        "clean@2", "clean@3", "clean@2+clean@3", "clean@3+clean@4"]
    assert_refused(fttl("prove", "--expendable", "run.average"), 2, "--expendable: expected with --run")
    assert_refused(fttl(*run, "--interrupt-at", 9), 2, "interrupt_at: expected steps from 1 to 5")


def test_a_script_is_proven_and_saves_are_planned(tmp_path: Path) -> None:
    script = Path(__file__).parent / "trainers" / "counting.py"
    done = fttl("prove-script", "--checkpoints", "*", "--kills", "checkpoints", "--max-checkpoints", 1, "--jobs", 1,
                "--", sys.executable, script, "--out", "{dir}", cwd=tmp_path)
    assert done.returncode in (0, 1) and "kill point" in done.stdout and done.stderr == ""
    assert_refused(fttl("prove-script", "--checkpoints", "*", cwd=tmp_path), 2, "a program that can be started")
    assert_refused(fttl("prove-script", "--checkpoints", "*", "--kills", "all", "--", "true", cwd=tmp_path), 2, "kills")
    assert_refused(fttl("prove-script", "--checkpoints", "*", "--resume-command", "'true", "--", "true", cwd=tmp_path),
                   2, "--resume-command: expected a command as a shell reads it, got 'true: No closing quotation")
    planned = fttl("plan", "--mtbf", 10800, "--stall", 5, "--json", cwd=tmp_path)
    assert planned.returncode == 0
    assert 320 < json.loads(planned.stdout)["optimal_seconds"] < 335  # Young: sqrt(2 * 5 * 10800) is 329
    assert_refused(fttl("plan", "--stall", 5, cwd=tmp_path), 2, "mtbf: expected")


def test_prove_refuses_data_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text(json.dumps(TEXT))
    assert_refused(fttl("prove", "--config", "text.json", cwd=tmp_path), 2, "corpus.txt")


def test_the_default_configuration_of_prove_is_shipped() -> None:
    from importlib.resources import files

    from fault_tolerant_transformer_lab.config import ExperimentConfig

    shipped = files("fault_tolerant_transformer_lab") / "configs" / "pydoc-cpu.json"
    assert ExperimentConfig.model_validate_json(shipped.read_text()).data == "pydoc"


# Crashes


def test_crashtest_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    done = fttl("crashtest", "--only", "kills-0", "--output", "report.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:3] == ["fault", "tried", "lost"] and "SIGKILL" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["lost"] == 0


def test_a_report_that_cannot_be_written_is_refused_first_and_the_table_is_never_lost(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    from fault_tolerant_transformer_lab import crashes, publication

    report, places = crashes.Report("quick", [crashes.Tried("kills", tried=3)]), []
    monkeypatch.setattr(crashes, "crashtest", lambda directory, **options: places.append(directory) or report)
    assert_refused(in_process(capsys, "crashtest", "--output", "/proc/x.json"), 2, "--output", "/proc", "another")
    assert_refused(in_process(capsys, "crashtest", "--directory", "/proc"), 2, "--directory", "/proc")
    refused = in_process(capsys, "crashtest", "--directory", tmp_path / "nowhere")
    assert_refused(refused, 2, "--directory", "folder that is there")
    assert_refused(in_process(capsys, "crashtest", "--only", "copies,hostile"), 2, "--only once for each")
    assert places == []

    def _full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(publication, "write_atomically", _full)
    told = in_process(capsys, "crashtest", "--output", tmp_path / "x.json", "--directory", tmp_path)
    assert told.returncode == 1 and "kills" in told.stdout and "No space left" in told.stderr
    assert places == [tmp_path] and list(tmp_path.iterdir()) == []


def test_a_report_of_losses_or_of_nothing_is_status_1() -> None:
    from fault_tolerant_transformer_lab.crashes import Report, Tried

    assert cli.report_outcome(Report("quick", [Tried("a", tried=3)])).status == 0
    lost = cli.report_outcome(Report("quick", [Tried("a", tried=3, lost=1, examples=["step 3 is gone"])]))
    assert lost.status == 1 and "step 3 is gone" in lost.complaint
    escaped = cli.report_outcome(Report("quick", [Tried("a", tried=3)], uncaught=["no sync"]))
    assert escaped.status == 1 and "no sync" in escaped.complaint
    beside = {"CheckpointStore": {"ext4": {"new": 2}}}
    assert cli.report_outcome(Report("quick", peers="no loop device", peers_beside=beside)).status == 0
    beside["CheckpointStore"]["xfs"] = {"old": 1}
    taken = cli.report_outcome(Report("quick", peers="no loop device", peers_beside=beside))
    assert taken.status == 1 and "xfs: CheckpointStore has old" in taken.complaint
    flips = {"torch.save": {"flips": 300, "loaded": 300}}  # what others lose says nothing of our own store
    refused = cli.report_outcome(Report("quick", peers="no loop", peers_beside="no loop", peer_flips=flips))
    assert refused.status == 1 and "nothing could be tried" in refused.complaint
    nothing = cli.report_outcome(Report("quick", [Tried("a", not_run="needs root")]))
    assert nothing.status == 1 and "not run" in nothing.text


def test_the_names_of_the_campaigns_are_those_of_the_crash_tests(tmp_path: Path) -> None:
    from fault_tolerant_transformer_lab import crashes

    names = [name for name, *_ in crashes._campaigns(tmp_path, crashes.SCALES["quick"], 1, False)]
    assert {name.replace(" ", "-") for name in names} | {"mutants", "peers"} == set(cli.CAMPAIGNS)


def test_soak_kills_and_leaves_the_folder_alone(tmp_path: Path, capsys) -> None:
    done = fttl("soak", "--kills", 1, "--output", "soaked", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 kill in ") and [p.name for p in (tmp_path / "soaked").iterdir()] == ["soak.json"]
    told = in_process(capsys, "soak", "--kills", 1, "--output", tmp_path / "soaked")
    assert_refused(told, 2, "--output", "empty")
    assert (tmp_path / "soaked" / "soak.json").exists()


# Refusals


@pytest.mark.parametrize("module", ["tyro", "fault_tolerant_transformer_lab.config"])
def test_an_interruption_of_the_first_imports_is_one_line(module: str) -> None:
    program = ("import sys\nclass Interrupting:\n    def find_spec(self, name, path=None, target=None):\n"
               f"        if name == {module!r}: raise KeyboardInterrupt\n"
               "sys.meta_path.insert(0, Interrupting())\nfrom fault_tolerant_transformer_lab.cli import main")
    done = subprocess.run([sys.executable, "-c", program], env=environment(), text=True, capture_output=True,
                          timeout=60, check=False)
    assert_refused(done, 130, "SIGINT")


def test_remedies_are_flags(run: Path, capsys) -> None:
    for flags in (["--resume", "never"], ["--learning-rate", "1e-3"], ["--resume", "never", "--resume-from", "4"],
                  ["--data", "pydoc", "--tokenizer", "byte", "--vocab-size", "257"]):
        told = assert_refused(in_process(capsys, "train", "--config", SMOKE, "--output", run, *flags), 2)
        assert not re.search(r"only=|resume=|resume_from|=True|[0-9a-f]{13}", told), told


REFUSALS = [
    (["train", "--config", "{smoke}", "--output", ""], ["--output", "empty", "fttl train --help"]),
    (["train", "--config", "", "--output", "out"], ["--config", "empty"]),
    (["prove", "--output="], ["--output", "empty"]),
    (["crashtest", "--output="], ["--output", "empty"]),
    (["soak", "--kills", "1", "--output", ""], ["--output", "empty"]),
    (["crashtest", "--only", "kils"], ["--only", "kils", "kills-0"]),
    (["soak", "--kills", "0"], ["--kills", "0"]),
    (["verify", ""], ["empty"]),
    (["inspect", ""], ["empty"]),
    (["diff", "file", ""], ["empty"]),
    (["sample", ""], ["empty"]),
    (["train", "--config", "{smoke}", "--output", "out", "--threads", "x"],
     ["--threads: expected a whole number, got 'x'; see fttl train --help"]),
    (["sample", "file", "--temperature", "warm"], ["--temperature: expected a number, got 'warm'"]),
    ([], ["train", "sample"]),
    (["trian"], ["trian", "train"]),
    (["train"], ["--config", "--output"]),
    (["train", "--config", "{smoke}", "--output", "out", "--learning-rat", "1"], ["--learning-rat", "--learning-rate"]),
    (["train", "--config", "{smoke}", "--output", "out", "--steps"], ["--steps"]),
    (["train", "--config", "{smoke}", "--output", "out", "--resume", "maybe"], ["maybe", "auto", "never", "must"]),
    (["train", "--config", "{smoke}", "--output", "out", "--resume-from", "x"], ["--resume-from", "x"]),
    (["train", "--config", "{smoke}", "--output", "out", "--stop-after-step", "-1"], ["stop", "-1"]),
    (["train", "--config", "{smoke}", "--output", "out", "--resume-from", "-1"], ["--resume-from", "-1"]),
    (["train", "--config", "{smoke}", "--output", "out", "--threads", "0"], ["--threads", "1", "0"]),
    (["train", "--config", "{smoke}", "--output", "out", "--threads", "1000000"], ["--threads", "1000000"]),
    (["train", "--config", "{smoke}", "--output", "out", "--learning-rate", "abc"], ["learning_rate", "abc"]),
    (["train", "--config", "{smoke}", "--output", "out", "--learning-rate", "nan"], ["learning_rate"]),
    (["train", "--config", "{smoke}", "--output", "out", "--learning-rate=-1"], ["learning_rate", "-1"]),
    (["train", "--config", "{smoke}", "--output", "out", "--steps", "0"], ["steps", "0"]),
    (["train", "--config", "{smoke}", "--output", "out", "--steps", "1.5"], ["steps", "1.5"]),
    (["train", "--config", "{smoke}", "--output", "out", "--seed", "18446744073709551616"], ["seed"]),
    (["train", "--config", "{smoke}", "--output", "out", "--n-heads", "5"], ["d_model", "n_heads"]),
    (["train", "--config", "{smoke}", "--output", "out", "--schedule.kind", "cosine"], ["schedule.horizon"]),
    (["train", "--config", "{smoke}", "--output", "out", "--schedule.kind", "linear"], ["schedule.kind", "linear"]),
    (["train", "--config", "{smoke}", "--output", "out", "--data", "text:nowhere", "--tokenizer", "byte",
      "--vocab-size", "257"], ["nowhere"]),
    (["train", "--config", "{smoke}", "--output", "out", "--data", "ftp"], ["data", "ftp"]),
    (["train", "--config", "{smoke}", "--output", "out", "--d-model", "4000000000"], ["memory"]),
    (["train", "--config", "missing.json", "--output", "out"], ["missing.json"]),
    (["train", "--config", "folder", "--output", "out"], ["folder"]),
    (["train", "--config", "broken.json", "--output", "out"], ["broken.json", "line 1"]),
    (["train", "--config", "twice.json", "--output", "out"], ["twice.json", "steps"]),
    (["train", "--config", "strange.json", "--output", "out"], ["strange.json", "colour"]),
    (["train", "--config", "{smoke}", "--output", "file"], ["file", "Not a directory"]),
    (["train", "--config", "{smoke}", "--output", "file/run"], ["run", "Not a directory"]),
    (["train", "--config", "{smoke}", "--output", "/proc/fttl/run"], ["proc/fttl", "ENOENT"]),
    (["prove", "--config", "missing.json"], ["missing.json"]),
    (["verify", "nowhere"], ["nowhere", "no such file"]),
    (["verify", "folder"], ["folder", "checkpoint"]),
    (["verify"], ["PATH"]),
    (["inspect", "nowhere"], ["nowhere"]),
    (["inspect", "folder"], ["folder"]),
    (["inspect", "a", "b"], ["b"]),
    (["diff", "file"], ["PATH"]),
    (["diff", "file", "nowhere"], ["nowhere"]),
    (["sample", "nowhere"], ["nowhere"]),
    (["sample", "file", "--n-tokens", "0"], ["--n-tokens", "0"]),
    (["sample", "file", "--n-tokens", "-5"], ["--n-tokens", "-5"]),
    (["sample", "file", "--temperature", "nan"], ["--temperature", "nan"]),
    (["sample", "file", "--temperature", "-1"], ["--temperature", "-1"]),
    (["sample", "file", "--seed", "-1"], ["--seed", "-1"]),
    (["compare-tuning", "--config", "{smoke}"], ["--output"]),
    (["compare-tuning", "--config", "{smoke}", "--output", "nowhere/F"], ["--output", "nowhere"]),
    (["compare-tuning", "--config", "{smoke}", "--output", "folder"], ["--output", "folder"]),
    (["compare-tuning", "--config", "{smoke}", "--output", "/dev/stdout"], ["--output", "/dev/stdout"]),
    (["crashtest", "--output", "/dev/full"], ["--output", "/dev/full"]),
    (["compare-tuning", "--config", "{smoke}", "--output", "F", "--rank", "0"], ["--rank", "0"]),
    (["compare-tuning", "--config", "{smoke}", "--output", "F", "--rank", "33"], ["rank: expected at most 32"]),
    (["compare-tuning", "--config", "{smoke}", "--output", "F", "--alpha", "0"], ["alpha", "0"]),
    (["compare-tuning", "--config", "{smoke}", "--output", "F", "--alpha", "nan"], ["alpha", "NaN"]),
    (["compare-tuning", "--config", "{smoke}", "--output", "F", "--targets", "*.qvk"], ["targets", "*.qvk"]),
    (["compare-tuning", "--config", "{smoke}", "--output", "F", "--device", "tpu"], ["device", "tpu"]),
    (["compare-tuning", "--config", "{smoke}", "--output", "F", "--device", "cuda:99"], ["device", "cuda:99"]),
    (["compare-tuning", "--config", "{smoke}", "--output", "F", "--threads", "0"], ["--threads", "0"]),
    (["compare-tuning", "--config", "{smoke}", "--output", "F", "--checkpoint-mode", "async"], ["checkpoint_mode"]),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSALS, ids=lambda value: " ".join(value)[:60])
def test_bad_input_is_one_line_and_status_2(arguments, words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "twice.json").write_text('{"steps": 1, "steps": 2}')
    (tmp_path / "strange.json").write_text(SMOKE.read_text().replace("}", ', "colour": 1}'))
    before = sorted(p.name for p in tmp_path.rglob("*"))
    done = in_process(capsys, *(a.replace("{smoke}", str(SMOKE)) for a in arguments))
    assert done.stdout == ""
    assert_refused(done, 2, *words)
    assert sorted(p.name for p in tmp_path.rglob("*") if "out" not in p.parts) == before
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_refusal_as_a_process_shows_no_traceback(tmp_path: Path) -> None:
    assert_refused(fttl("train", "--config", "missing.json", "--output", "out", cwd=tmp_path), 2, "missing.json")
    assert_refused(fttl("verify", "nowhere", cwd=tmp_path), 2, "nowhere")


def test_a_full_disk_is_one_line(trained: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(command("inspect", trained / "A"), env=environment(), text=True, stdout=full,
                              stderr=subprocess.PIPE, timeout=120, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "no space left" in done.stderr


# The streams


def test_a_reader_that_goes_away_is_quiet(trained: Path) -> None:
    process = start("inspect", trained / "A", "--json")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=120) == 128 + signal.SIGPIPE
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_do_not_change_the_status(closed: str, run: Path, tmp_path: Path) -> None:
    for arguments, status in ((["train", "--config", SMOKE, "--output", run, "--steps", 12], 0),
                              (["verify", run], 0), (["verify", "nowhere"], 2), (["--help"], 0)):
        line = " ".join(f"'{word}'" for word in command(*arguments)) + f" {closed}"
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment(), capture_output=True, text=True,
                              timeout=120, check=False)
        assert done.returncode == status, (arguments, done.stderr)
        assert "Traceback" not in done.stderr


def test_a_terminal_of_ascii_only(trained: Path) -> None:
    done = fttl("inspect", trained / "A", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0 and done.stdout.isascii(), done.stderr


def test_control_characters_are_escaped(tmp_path: Path) -> None:
    done = fttl("verify", "no\x1b[31mwhere", cwd=tmp_path)
    assert_refused(done, 2, "no\\x1b[31mwhere")
    assert fttl("verify", "no\udcffwhere", cwd=tmp_path).returncode == 2


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    "Change a checkpoint's document and make the header's digest right again, as a forger would."
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + length])
    document = json.loads(header["__metadata__"]["fttl"])
    change(document)
    document["file_digest"] = "0" * 64
    header["__metadata__"]["fttl"] = json.dumps(document, separators=(",", ":"))
    text = json.dumps(header, separators=(",", ":")).encode()
    whole = (len(text) + (-len(text) - 8) % 4096).to_bytes(8, "little") + text + b" " * ((-len(text) - 8) % 4096)
    path.write_bytes(whole.replace(b"0" * 64, blake3(whole).hexdigest().encode(), 1) + raw[8 + length:])


def test_sample_builds_no_model_that_the_file_does_not_hold(run: Path, capsys) -> None:
    newest = checkpoints(run)[-1]
    edited(newest, lambda document: document["config"]["config"].update(n_layers=3_000_000))
    assert_refused(in_process(capsys, "sample", newest), 2, "3000000 layers", "holds no such model")


def test_verify_goes_on_past_an_unknown_schema(run: Path, capsys) -> None:
    older, newest = checkpoints(run)
    edited(older, lambda document: document.update(schema_version=99))
    assert_refused(in_process(capsys, "verify", run), 2, "schema version 99")
    flip(newest, newest.stat().st_size - 7)
    assert_refused(in_process(capsys, "verify", run), 1, newest.name)
