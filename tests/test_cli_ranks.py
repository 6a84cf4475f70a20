"""The command line for several ranks, as processes: torchrun, --nproc, what they leave, and every refusal."""
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from test_cli import SMOKE, assert_refused, command, environment, flip, fttl, in_process

from fault_tolerant_transformer_lab import cli
from fault_tolerant_transformer_lab.checkpoint_file import open_checkpoint
from fault_tolerant_transformer_lab.config import load_config
from fault_tolerant_transformer_lab.distributed import run_ranks
from fault_tolerant_transformer_lab.launch import MatrixCell, train_rank

SHAPE = ("--grad-accumulation", "2", "--batch-size", "1", "--n-layers", "1", "--d-model", "8", "--n-heads", "1")
TINY = (*SHAPE, "--steps", "4", "--checkpoint-every", "2")
CONFIG = load_config(SMOKE).replace(grad_accumulation=2, batch_size=1, n_layers=1, d_model=8, n_heads=1, steps=4,
                                    checkpoint_every=2)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `F` of two ranks under FSDP2, and what its command said; no test changes it."""
    folder = tmp_path_factory.mktemp("ranks")
    done = fttl("train", "--config", SMOKE, "--output", "F", "--nproc", 2, "--parallel", "fsdp", *TINY, cwd=folder)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    (folder / "F.stdout").write_text(done.stdout)
    return folder


@pytest.fixture
def run(two_ranks: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be changed."""
    return Path(shutil.copytree(two_ranks / "F", tmp_path / "F"))


def children_of(pid: int) -> list[int]:
    """The child processes of a process, the oldest first."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(map(int, found))


def ranks_of(launcher: "subprocess.Popen[str]") -> dict[int, int]:
    """Process ids of a launcher's ranks, by rank."""
    found = {}
    for pid in children_of(launcher.pid):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        rank = [pair.partition(b"=")[2] for pair in pairs if pair.startswith(b"RANK=")]
        if rank:
            found[int(rank[0])] = pid
    return found


def wait_until(reached: Callable[[], bool], processes: "list[subprocess.Popen[str]]") -> None:
    """Wait for something that processes do; they live on."""
    limit = time.monotonic() + 120
    while not reached():
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "timed out"
        time.sleep(0.05)


def launched(folder: Path, every: int) -> "subprocess.Popen[str]":
    """A long run of two ranks that has published a checkpoint."""
    long = ["train", "--config", SMOKE, "--output", "L", "--nproc", 2, *SHAPE, "--steps", 100_000,
            "--checkpoint-every", every]
    process = subprocess.Popen(command(*long), cwd=folder, env=environment(), text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    wait_until(lambda: bool(list((folder / "L" / "checkpoints").glob("step-*"))), [process])
    return process


def ended(process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    """Wait for a process, and give what it said."""
    stdout, stderr = process.communicate(timeout=120)
    return subprocess.CompletedProcess([], process.returncode, stdout, stderr)


# Training


def test_nproc_trains_and_one_rank_says_so(two_ranks: Path) -> None:
    said = (two_ranks / "F.stdout").read_text()
    result = json.loads((two_ranks / "F" / "result.json").read_text())
    assert said.count("completed ") == 1 and "4 steps" in said and result["state_digest"] in said
    names = sorted(path.name for path in (two_ranks / "F" / "checkpoints").glob("step-*"))
    assert names == ["step-00000002", "step-00000004"] and len(result["state_digest"]) == 64
    ends = run_ranks(lambda ranks: train_rank(CONFIG, two_ranks / "G", ranks, parallel="fsdp").state_digest, 2)
    assert ends == [result["state_digest"]] * 2


def test_torchrun_starts_the_command_and_ddp_makes_the_bits_of_one_process(tmp_path: Path, capsys) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
                "fault_tolerant_transformer_lab", "train", "--config", str(SMOKE), "--output", "D", "--parallel", "ddp",
                *TINY, "--stop-after-step", "2"]
    done = subprocess.run(torchrun, cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=300,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("completed ") == 1
    going_on = next(line for line in done.stdout.splitlines() if line.startswith("to go on")).split()[3:]
    assert going_on[:2] == ["fttl", "train"] and "--parallel ddp --nproc 2" in " ".join(going_on)
    again = fttl(*going_on[1:], cwd=tmp_path)
    assert again.returncode == 0 and "resumed from step 2" in again.stdout, again.stderr
    assert in_process(capsys, "train", "--config", SMOKE, "--output", tmp_path / "one", *TINY).returncode == 0
    found = in_process(capsys, "diff", tmp_path / "D", tmp_path / "one", "--json")
    other = {difference["path"].partition(".")[0] for difference in json.loads(found.stdout)["differences"]}
    assert other <= {"rng"} and (tmp_path / "D" / "metrics.jsonl").read_bytes() == (
        tmp_path / "one" / "metrics.jsonl").read_bytes()


def test_two_hosts_of_torchrun_make_one_run_and_end_together(two_ranks: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]

    def host(*flags: object) -> "subprocess.Popen[str]":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                    "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "-m",
                    "fault_tolerant_transformer_lab", "train", "--config", SMOKE, "--output", "H", "--parallel", "fsdp"]
        return subprocess.Popen([*map(str, torchrun), *map(str, flags)], cwd=tmp_path, env=environment(), text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    hosts = [host(*SHAPE, "--steps", 100_000, "--checkpoint-every", 2, "--keep-last", 100_000) for _ in range(2)]
    log = tmp_path / "H" / "metrics.jsonl"
    wait_until(lambda: log.exists() and len(log.read_bytes().splitlines()) > 4, hosts)
    os.kill(next(iter(ranks_of(hosts[1]).values())), signal.SIGKILL)
    begun = time.monotonic()
    assert all(ended(process).returncode for process in hosts) and time.monotonic() - begun < 60
    hosts = [host(*TINY, "--resume-from", 2, "--stop-after-step", 4) for _ in range(2)]
    last = [ended(process) for process in hosts]
    assert [done.returncode for done in last] == [0, 0] and sum(done.stdout.count("completed ") for done in last) == 1
    results = [json.loads((folder / "result.json").read_text()) for folder in (two_ranks / "F", tmp_path / "H")]
    assert results[0]["state_digest"] == results[1]["state_digest"] and results[1]["resumed_from"] == 2


def test_elastic_goes_on_with_fewer_ranks_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    elastic = ["train", "--config", SMOKE, "--output", tmp_path / "E", "--parallel", "elastic", *TINY]
    by_config = [word for word in elastic if word not in ("--parallel", "elastic")]  # the same, said by the file
    shards = json.loads(SMOKE.read_text()) | {"elastic": {"logical_shards": 2}}
    (tmp_path / "shards.json").write_text(json.dumps(shards))
    by_config[by_config.index(SMOKE)] = tmp_path / "shards.json"
    done = fttl(*by_config, "--nproc", 2, "--stop-after-step", 2)
    assert done.returncode == 0, done.stderr
    last = fttl(*elastic, "--nproc", 1)
    assert last.returncode == 0 and "resumed from step 2" in last.stdout, last.stderr
    one = run_ranks(lambda ranks: train_rank(CONFIG, tmp_path / "one", ranks, parallel="elastic").state_digest, 1)
    assert json.loads((tmp_path / "E" / "result.json").read_text())["state_digest"] == one[0]


def test_a_rank_that_is_killed_ends_the_run_within_seconds_and_is_named_once(tmp_path: Path) -> None:
    process = launched(tmp_path, every=2)
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGKILL)
    assert_refused(ended(process), 2, "rank 1 of 2 was the first to fail: killed by SIGKILL")
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    assert fttl("verify", "L", cwd=tmp_path).returncode == 0


def test_a_request_to_stop_saves_and_is_told_once(tmp_path: Path) -> None:
    process = launched(tmp_path, every=50)
    process.send_signal(signal.SIGTERM)
    newest_before = sorted((tmp_path / "L" / "checkpoints").glob("step-*"))[-1].name
    done = ended(process)
    newest = sorted((tmp_path / "L" / "checkpoints").glob("step-*"))[-1].name
    assert_refused(done, 128 + signal.SIGTERM, f"saved as L/checkpoints/{newest}", "--resume auto")
    assert newest > newest_before
    logged = [json.loads(line)["step"] for line in (tmp_path / "L" / "metrics.jsonl").read_text().splitlines()]
    assert logged == list(range(1, int(newest[5:13]) + 1))


def test_a_cause_is_told_once_with_its_rank(tmp_path: Path) -> None:
    done = fttl("train", "--config", SMOKE, "--output", tmp_path / "run", "--nproc", 2, *TINY, "--data", "text:nowhere",
                "--tokenizer", "byte", "--vocab-size", 257)
    line = assert_refused(done, 2, "nowhere")
    assert line.startswith(("fttl: rank 0: ", "fttl: rank 1: "))


REFUSED = [
    (["--parallel", "tp", "--nproc", "2"], "--parallel"),
    (["--parallel", "ddp"], "--nproc"),
    (["--nproc", "0"], "from 1 to 1024, got 0"),
    (["--nproc", "3"], "grad_accumulation: expected a multiple of the 3 ranks, got 2"),
    (["--nproc", "3", "--parallel", "elastic"], "grad_accumulation: expected at least 3 logical shards"),
    (["--nproc", "2", "--ema-decay", "0.9"], "ema_decay"),
    (["--nproc", "2", "--parallel", "ddp", "--elastic.logical-shards", "2"], "expected elastic, since"),
    (["--nproc", "0", "--elastic.logical-shards", "2"], "from 1 to 1024, got 0"),
    (["--nproc", "3", "--elastic.logical-shards", "2"], "expected at least 3 logical shards"),
    (["--nproc", "2", "--elastic.logical-shards", "4"], "elastic.logical_shards: expected the micro-batches of a step"),
    (["--max-restarts", "1"], "--max-restarts: expected with --nproc"),
    (["--nproc", "2", "--max-restarts", "1", "--resume", "never"], "--resume never: expected no restarts"),
    (["--nproc", "2", "--max-restarts", "1", "--resume-from", "2"], "--resume-from 2: expected no restarts"),
    (["--nproc", "2", "--device", "cuda:0"], "--device: expected cpu, cuda or auto for ranks, got cuda:0"),
    (["--nproc", "2", "--learning-rate", "nan"], "learning_rate"),
]


@pytest.mark.parametrize(("flags", "word"), REFUSED)
def test_what_ranks_cannot_do_is_refused_before_any_is_started(flags, word, tmp_path: Path, capsys) -> None:
    done = in_process(capsys, "train", "--config", SMOKE, "--output", tmp_path / "new", *TINY, *flags)
    assert_refused(done, 2, word)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("flags", "rank", "word"), [
    ([], "0", "--parallel: expected ddp, fsdp or elastic for the 3 ranks"),
    (["--nproc", "2"], "0", "--nproc: expected outside of torchrun"),
    (["--parallel", "ddp"], "0", "grad_accumulation: expected a multiple of the 3 ranks"),
    (["--parallel", "ddp"], "1", None),
    (["--parallel", "elastic", "--resume", "never"], "0", "--resume never: expected no restarts, got 2"),
])
def test_a_rank_of_torchrun_refuses_and_one_of_a_host_says_so(flags, rank, word, tmp_path, capsys, monkeypatch) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "3", "TORCHELASTIC_MAX_RESTARTS": "2"}.items():
        monkeypatch.setenv(name, value)
    done = in_process(capsys, "train", "--config", SMOKE, "--output", tmp_path / "new", *TINY, *flags)
    assert done.returncode == 2 and done.stdout == ""
    if word is None:
        assert done.stderr == ""
    else:
        assert_refused(done, 2, word)


# What several ranks wrote


def test_verify_finds_the_file_and_the_chunk_that_is_damaged(run: Path, capsys) -> None:
    done = in_process(capsys, "verify", run)
    assert done.returncode == 0 and done.stdout.count(" intact ") == 2
    newest = run / "checkpoints" / "step-00000004"
    flip(newest / "rank-00001.safetensors", (newest / "rank-00001.safetensors").stat().st_size - 9)
    done = in_process(capsys, "verify", run, "--json")
    assert_refused(done, 1, f"{newest}/rank-00001.safetensors")
    assert [entry["intact"] for entry in json.loads(done.stdout)] == [True, False]
    done = in_process(capsys, "verify", newest)
    assert done.returncode == 1
    (newest / "generation.json").unlink()
    assert_refused(in_process(capsys, "verify", newest), 1, "generation.json")
    os.rename(newest, newest.with_name("step-00000004.corrupt"))
    assert "set aside (corrupt)" in in_process(capsys, "verify", run).stdout
    os.rename(run / "checkpoints" / "step-00000002", run / "checkpoints" / "step-00000009")
    assert_refused(in_process(capsys, "verify", run), 1, "holds step 2", "step-00000009")


def test_inspect_describes_the_newest_generation(two_ranks: Path, capsys) -> None:
    done = in_process(capsys, "inspect", two_ranks / "F")
    assert done.returncode == 0 and "ranks        2, a file each" in done.stdout
    assert "world_size=2" in done.stdout and "model.blocks.0.attention.qkv.weight" in done.stdout
    plain = json.loads(in_process(capsys, "inspect", two_ranks / "F", "--json").stdout)
    assert (plain["step"], plain["world_size"], len(plain["files"])) == (4, 2, 2)
    weight = plain["tensors"]["model.blocks.0.attention.qkv.weight"]
    assert (weight["shape"], weight["bytes"]) == ([24, 8], 24 * 8 * 4)
    assert [chunk["sizes"] for chunk in weight["chunks"]] == [[12, 8], [12, 8]]
    assert plain["tensors"]["optimizer.state.0.exp_avg"]["path"] == "optimizer.state[0].exp_avg"
    assert "\nledger: " in done.stdout and plain["ledger"]["adds_up"]
    assert [attempt["steps"] for attempt in plain["ledger"]["attempts"]] == [{"useful": 4, "replayed": 0}]
    assert "ledger" not in json.loads(in_process(
        capsys, "inspect", two_ranks / "F" / "checkpoints", "--json").stdout)  # of a checkpoint, not of a run


def test_diff_compares_generations_and_files(two_ranks: Path, run: Path, tmp_path: Path, capsys) -> None:
    a, b = two_ranks / "F" / "checkpoints" / "step-00000004", run
    assert in_process(capsys, "diff", a, b).stdout.splitlines()[-1] == "bitwise equal"
    quick = in_process(capsys, "diff", a, b, "--headers-only")
    assert quick.stdout.splitlines()[-1] == "equal by their recorded digests; bytes not read"
    earlier = in_process(capsys, "diff", a, a.with_name("step-00000002"), "--headers-only", "--json")
    found = json.loads(earlier.stdout)
    assert earlier.returncode == 1 and "step" in {d["path"] for d in found["differences"]}
    assert found["bytes_verified"] is False  # tensors were compared, and none was held against its digest
    whole = json.loads(in_process(capsys, "diff", a, b, "--json").stdout)
    assert whole["bytes_verified"] and whole["equal"]
    assert in_process(capsys, "export", a, tmp_path / "one.safetensors").returncode == 0
    whole = in_process(capsys, "diff", a, tmp_path / "one.safetensors", "--headers-only")
    assert whole.returncode == 0 and whole.stdout.splitlines()[-1] == "bitwise equal"  # it had to be read


def test_a_sample_of_a_sharded_checkpoint_is_that_of_its_export(two_ranks: Path, tmp_path: Path, capsys) -> None:
    assert in_process(capsys, "export", two_ranks / "F", tmp_path / "one.safetensors").returncode == 0
    texts = [in_process(capsys, "sample", path, "--prompt", "1 2 3", "--n-tokens", 5).stdout
             for path in (two_ranks / "F", tmp_path / "one.safetensors")]
    assert texts[0] == texts[1] and len(texts[0].split()) == 8


# One file for others, and from others


def test_export_writes_one_file_with_whole_tensors(two_ranks: Path, tmp_path: Path, capsys) -> None:
    done = in_process(capsys, "export", two_ranks / "F", tmp_path / "one.safetensors")
    assert (done.returncode, done.stderr) == (0, "") and "of step 4" in done.stdout
    tensors = load_file(tmp_path / "one.safetensors")
    assert tensors["model.blocks.0.attention.qkv.weight"].shape == (24, 8)
    assert in_process(capsys, "verify", tmp_path / "one.safetensors").returncode == 0


def test_export_refuses_what_is_none_and_never_replaces_a_file(two_ranks: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "there").write_text("mine")
    empty = tmp_path / "empty"
    empty.mkdir()
    one = tmp_path / "one.safetensors"
    assert_refused(in_process(capsys, "export", two_ranks / "F", tmp_path / "there"), 2, "the name of a new file")
    assert (tmp_path / "there").read_text() == "mine"
    assert_refused(in_process(capsys, "export", two_ranks / "F", tmp_path / "no" / "x"), 2, "a folder that is there")
    assert_refused(in_process(capsys, "export", empty, one), 2, "without a published checkpoint")
    assert_refused(in_process(capsys, "export", tmp_path / "nowhere", one), 2, "nowhere", "check the path")
    assert_refused(in_process(capsys, "export", tmp_path / "there", one), 2, "got one file")
    assert in_process(capsys, "train", "--config", SMOKE, "--output", tmp_path / "R", *TINY).returncode == 0
    assert_refused(in_process(capsys, "export", tmp_path / "R", one), 2, "step-00000004.safetensors", "got one file")
    assert not one.exists() and not list(tmp_path.glob(".*"))


def test_import_takes_a_torch_save_file_and_a_dcp_folder(tmp_path: Path, capsys) -> None:
    model = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2, dtype=torch.bfloat16)}
    torch.save({"model": model, "epoch": 3}, tmp_path / "saved.pt")
    dcp.save({"model": model}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    for source in ("saved.pt", "dcp"):
        target = tmp_path / f"{source}.safetensors"
        done = in_process(capsys, "import", tmp_path / source, target, "--key", "model")
        assert (done.returncode, done.stderr) == (0, "") and "2 tensors" in done.stdout and "of step 0" in done.stdout
        with open_checkpoint(target) as found:
            assert {name: leaf.load().tolist() for name, leaf in found.tree["model"].items()} == {
                "weight": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], "bias": [1.0, 1.0]}
    torch.save(model["weight"], tmp_path / "there")
    assert_refused(in_process(capsys, "import", tmp_path / "saved.pt", tmp_path / "there"), 2, "a new file")


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")


def test_import_refuses_what_is_none_and_runs_nothing(two_ranks: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "text").write_text("hello")
    torch.save({"model": Evil(tmp_path / "made")}, tmp_path / "evil.pt")
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    torch.save({"a": torch.ones(2)}, tmp_path / "good.pt")
    one = tmp_path / "one.safetensors"
    for source, *words in (("nowhere", "check the path"), ("text", "expected a file of torch.save"),
                           ("evil.pt", "open"), ("evil", "nothing was run"),
                           (two_ranks / "F" / "checkpoints" / "step-00000004", ".metadata", "fttl export")):
        assert_refused(in_process(capsys, "import", tmp_path / source, one), 2, *words)
    assert_refused(in_process(capsys, "import", tmp_path / "good.pt", one, "--key", "model"), 2, "'model'", "'a'")
    assert_refused(in_process(capsys, "import", tmp_path / "good.pt", one, "--participant", "a b"), 2, "--participant")
    assert not (tmp_path / "made").exists() and not one.exists()


# Proofs and plans


def test_prove_kills_ranks_everywhere_and_compares(tmp_path: Path, capsys) -> None:
    config = tmp_path / "two.json"
    config.write_text(json.dumps(CONFIG.describe()))
    done = in_process(capsys, "prove", "--config", config, "--nproc", 2, "--parallel", "fsdp", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["verdict"] == "EQUIVALENT", done.stdout + done.stderr
    killed = " ".join(place for cell in found["cells"] for place in cell["places"])
    for where in ("rank 1 before_forward", "rank 0, 1 before_forward", "after_backward", "after_update",
                  "rank 0 during_write (operation 1)", "rank 1 during_write (operation 1)", "after_publication",
                  "launcher"):
        assert where in killed
    assert all(cell["equal"] and cell["struck"] for cell in found["cells"])
    assert all(cell["resumed_from"] in (2, 4) for cell in found["cells"])  # none began anew


@pytest.mark.parametrize(("equal", "struck", "status"), [(True, True, 0), (False, True, 1), (True, False, 1)])
def test_a_proof_of_ranks_fails_where_one_run_ends_otherwise_or_nobody_died(equal, struck, status) -> None:
    good = MatrixCell("ddp", 2, ("rank 1 after_update of step 2",), True, 2, True)
    outcome = cli.ranks_outcome([good, MatrixCell("ddp", 2, ("x",), struck, None, equal)], 4, json=False)
    assert outcome.status == status and ("EQUIVALENT" if status == 0 else "DIVERGENT") in outcome.text


@pytest.mark.parametrize("json_", [False, True])
def test_a_proof_of_ranks_in_which_no_run_did_a_step_after_its_resume_proves_nothing(json_) -> None:
    anew = MatrixCell("ddp", 2, ("rank 1 after_update of step 2",), True, None, True)
    at_its_end = MatrixCell("ddp", 2, ("rank 1 after_publication of step 2",), True, 2, True)
    for cells in ([], [anew], [anew, at_its_end]):
        outcome = cli.ranks_outcome(cells, 2, json=json_)
        assert outcome.status == 1 and "NOT_EXERCISED" in outcome.text and "EQUIVALENT" not in outcome.text
        assert outcome.complaint == "no run that was killed went on from a checkpoint and did another step, so no "\
            "resume was tried; save before the last step, and kill behind that save"
    assert cli.ranks_outcome([anew, at_its_end], 3, json=json_).status == 0


def test_prove_of_ranks_that_save_only_at_the_end_proves_nothing(tmp_path: Path, capsys) -> None:
    config = tmp_path / "end.json"
    config.write_text(json.dumps(CONFIG.replace(steps=2, checkpoint_every=2).describe()))
    done = in_process(capsys, "prove", "--config", config, "--nproc", 1, "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["verdict"] == "NOT_EXERCISED", done.stdout + done.stderr
    assert "no resume was tried; save before the last step" in done.stderr


@pytest.mark.parametrize(("flags", "word"), [
    (["--parallel", "ddp"], "--parallel: expected with --nproc"),
    (["--every-operation"], "--every-operation: expected with --nproc"),
    (["--nproc", "2", "--point", "x"], "--point: expected without --nproc"),
    (["--nproc", "2", "--html", "x.html"], "--html: expected without --nproc"),
    (["--nproc", "2", "--run", "a:b", "--steps", "2"], "--run: expected without --nproc"),
    (["--nproc", "2"], "grad_accumulation: expected a multiple of the 2 ranks, got 1"),
    (["--nproc", "0"], "--nproc: expected"),
])
def test_a_proof_of_ranks_refuses_what_it_cannot_do(flags, word, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    config = [] if "--run" in flags else ["--config", SMOKE]
    assert_refused(in_process(capsys, "prove", *config, *flags), 2, word)


SHARDED = ["--state-bytes", "8e9", "--shards", "4", "--rank-bandwidth", "1e9", "--storage-bandwidth", "2e9",
           "--mtbf", "10000"]


def test_a_plan_of_a_sharded_save_waits_for_the_slower_of_rank_and_storage(capsys) -> None:
    found = json.loads(in_process(capsys, "plan", *SHARDED, "--synchronous", "--json").stdout)
    assert found["costs_seconds"]["stall"] == pytest.approx(4.0, abs=0.01)  # 8 GB through 2 GB/s
    behind = json.loads(in_process(capsys, "plan", *SHARDED, "--copy-bandwidth", "1e9", "--readers", "8",
                                   "--json").stdout)
    assert behind["costs_seconds"]["stall"] == pytest.approx(2.0)  # a part of 2 GB through 1 GB/s of memory
    assert behind["costs_seconds"]["commit_delay"] == pytest.approx(4.0, abs=0.01)
    assert behind["costs_seconds"]["restore"] == pytest.approx(8.0)  # eight parts of 2 GB through 2 GB/s


@pytest.mark.parametrize(("flags", "words"), [
    (["--mtbf", "9", "--shards", "4"], ["--shards: expected with all of", "--state-bytes, --rank-bandwidth"]),
    (["--mtbf", "9", "--stall", "1", "--synchronous"], ["--synchronous: expected with all of"]),
    ([*SHARDED, "--fan-in", "1"], ["fan_in", "at least 2, got 1"]),
    ([*SHARDED, "--shards", "0"], ["shards", "at least 1, got 0"]),
])
def test_a_plan_of_half_a_sharded_save_is_refused(flags, words, capsys) -> None:
    assert_refused(in_process(capsys, "plan", *flags), 2, *words)
