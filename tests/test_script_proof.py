"""Script mode on scripts that are really killed: each verdict, each planted bug, each way of writing a checkpoint."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch

from fault_tolerant_transformer_lab import script_proof
from fault_tolerant_transformer_lab.equivalence import ProofError
from fault_tolerant_transformer_lab.script_proof import CheckpointReader, prove_script

TRAINERS = Path(__file__).resolve().parent / "trainers"
needs_strace = pytest.mark.skipif(bool(script_proof._no_strace()), reason=script_proof._no_strace() or "none")


def prove(bug="", *words, **wishes):
    "Prove the NumPy loop with a bug."
    command = [sys.executable, str(TRAINERS / "numpy_loop.py"), "--out", "{dir}", "--bug", bug, *words]
    files = ["ckpt.safetensors", "step-*.safetensors", "final-ema.safetensors"]
    return prove_script(command, **{"checkpoints": files, "steps_flag": "--steps", "steps": 4, "progress_bar": False,
                                    **wishes})


def count(how="safe", *words, **wishes):
    "Prove the counting script."
    command = [sys.executable, str(TRAINERS / "counting.py"), "--out", "{dir}", "--how", how, *words]
    return prove_script(command, **{"checkpoints": ["ckpt", "ckpt.json"], "progress_bar": False, **wishes})


# Verdicts


@needs_strace
def test_a_sound_script_is_equivalent_wherever_it_is_killed():
    proof = prove(max_checkpoints=3, max_events=4, random_kills=1)
    assert proof.verdict == "EQUIVALENT", proof
    kinds = {row.point.partition("-")[0] for row in proof.rows}
    assert kinds == {"checkpoint", "event", "chain", "disk", "random"}
    assert max(row.kills for row in proof.rows) == 3
    assert proof.findings == () and proof.observed == ""
    proof.raise_if_different()


PLANTED = {"momentum not restored": "optimizer", "generator not restored": "generator",
           "batch repeated": "data position", "EMA not restored": "EMA", "EMA outside": "EMA",
           "rate changed": "learning rate",
           "schedule off by one": "learning rate", "step off by one": "step", "generator not saved": "generator",
           "position not saved": "data position", "momentum not saved": "optimizer"}


@needs_strace
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found_where_it_arises_and_called_by_its_name(bug):
    proof = prove(bug, only=["checkpoint-2"])
    assert proof.verdict == "DIVERGENT"
    found = proof.worst.diagnosis
    assert found.suspects[0].name == PLANTED[bug], found
    assert found.step == (None if bug == "EMA outside" else 3)  # killed after step 2: the first one after the restart
    with pytest.raises(ProofError, match="first difference"):
        proof.raise_if_different()


@needs_strace
def test_a_bug_of_the_epoch_boundary_shows_at_the_boundary_only():
    proof = prove("epoch boundary", "--series", kills=["checkpoints"], steps=5)
    outcomes = {row.point: row.outcome for row in proof.rows}
    assert proof.verdict == "DIVERGENT"
    assert [point for point, outcome in outcomes.items() if outcome == "different"] == ["checkpoint-3"]
    assert "checkpoint-2" in proof.reason  # it says which kills were survived


@needs_strace
@pytest.mark.parametrize("words", [(), ("--series",)])
def test_starting_over_silently_is_lost_work_though_the_end_is_equal(words):
    proof = prove("starts over", *words, kills=["checkpoints", "chain"])
    assert proof.verdict == "LOST_WORK"
    lost = {row.point: row.lost for row in proof.rows if row.outcome == "lost work"}
    assert lost["checkpoint-3"] == 3 and lost["chain-3"] >= 1
    assert "3 steps of work lost" in next(row.detail for row in proof.rows if row.point == "checkpoint-3")


@needs_strace
@pytest.mark.parametrize("wishes", [{"only": ["checkpoint-1"]}, {"kills": ["chain"], "chain": 2},
                                    {"kills": ["events"], "max_events": 2}])
@pytest.mark.parametrize("words", [(), ("--series",)])
def test_starting_over_is_lost_work_though_one_checkpoint_was_there(words, wishes):
    proof = prove("starts over", *words, **wishes)
    assert proof.verdict == "LOST_WORK", proof
    assert prove("", *words, **wishes).verdict == "EQUIVALENT"


def test_two_runs_that_differ_leave_nothing_to_judge():
    proof = prove("unseeded", "--series", only=["checkpoint-1"])
    assert proof.verdict == "NONDETERMINISTIC" and proof.rows == ()
    assert "step 1, step-1.safetensors:model.weight" in proof.reason
    assert prove("unseeded", "--series", ignore=["model.*", "ema.*", "optimizer.*"], only=["checkpoint-2"]).verdict != \
        "NONDETERMINISTIC"


def test_the_operation_that_makes_two_runs_differ_is_named_in_a_script_that_knows_nothing_of_it(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")  # somebody's own stays in force
    script = tmp_path / "train.py"
    script.write_text("""import multiprocessing, sys
import torch
print(multiprocessing.get_context("fork").Pool(1).map(abs, [-1]))
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
for step in range(2):
    if step:
        torch.seed()
    loss = net(torch.ones(64, 2)).sum()
    loss.backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
torch.save(net.state_dict(), sys.argv[1] + "/ckpt.pt")
""")
    proof = prove_script([sys.executable, str(script), "{dir}"], checkpoints="ckpt.pt", locate_op=True, trace=False,
                         environment={"PYTHONPATH": str(tmp_path)}, progress_bar=False, directory=tmp_path / "runs")
    assert proof.verdict == "NONDETERMINISTIC", proof
    told = proof.reason.partition("; operation: ")[2]
    assert told.startswith("step 2, operation ") and "bernoulli" in told and "in Dropout, called at train.py:9" in told
    assert all(log.read_text().startswith("mine") for log in (tmp_path / "runs").rglob("said-0.log"))


def test_no_operation_is_made_up_for_a_script_without_torch():
    proof = prove("unseeded", "--series", only=["checkpoint-1"], locate_op=True)
    assert proof.verdict == "NONDETERMINISTIC"
    assert "operation: not found: no operation of torch was seen" in proof.reason


@needs_strace
def test_a_proof_that_could_not_fail_says_so():
    assert "no weight changes" in prove("nothing learned", only=["checkpoint-2"]).reason
    one = count("safe", "--steps", "1")
    assert one.verdict == "NOT_EXERCISED" and "one checkpoint" in one.reason
    none = count("safe", checkpoints="*.pt")
    assert none.verdict == "NOT_EXERCISED" and "which holds ckpt.json" in none.reason


@needs_strace
def test_a_restart_that_has_nothing_left_to_do_is_no_proof():
    "The loop writes one file more after its last checkpoint, and a kill before that restarts a run that is at its end."
    proof = prove("momentum not restored", checkpoints="ckpt.safetensors", only=["checkpoint-2", "checkpoint-4"])
    assert [row.point for row in proof.rows] == ["checkpoint-2", "checkpoint-4"]
    assert [row.outcome for row in proof.rows] == ["different", "not exercised"]
    assert prove("", checkpoints="ckpt.safetensors", only=["checkpoint-4"]).verdict == "NOT_EXERCISED"


@needs_strace
def test_a_refusal_is_told_from_a_breakage():
    refused, broken = prove("refuses", only=["checkpoint-2"]), prove("breaks", only=["checkpoint-2"])
    assert refused.verdict == broken.verdict == "ERROR"
    assert refused.rows[0].outcome == "refused" and "expected the same machine" in refused.rows[0].detail
    assert broken.rows[0].outcome == "error" and "RuntimeError: cannot restore" in broken.rows[0].detail


def test_a_script_that_fails_by_itself_is_an_error_with_its_last_words():
    proof = count("hopeless")
    assert proof.verdict == "ERROR" and "exit status 1: nothing can be done" in proof.reason


def test_a_script_that_fails_without_a_word_is_told_so():
    proof = prove_script([sys.executable, "-c", "raise SystemExit(3)"], checkpoints="*.pt", progress_bar=False)
    assert proof.verdict == "ERROR" and proof.reason.endswith("exit status 3: it said nothing")


def test_a_script_that_hangs_is_ended():
    command = [sys.executable, "-c", "import time; time.sleep(600)", "{dir}"]
    started = time.monotonic()
    proof = prove_script(command, checkpoints="*", timeout=1.0, trace=False, progress_bar=False)
    assert proof.verdict == "ERROR" and "did not end within 1 s" in proof.reason
    assert time.monotonic() - started < 60
    assert proof.table() == str(proof)  # no head of a table over no row


def test_a_script_that_writes_elsewhere_is_told_so(tmp_path):
    command = [sys.executable, "-c", f"open({str(tmp_path / 'ckpt.json')!r}, 'w').write('{{}}')", "{dir}"]
    proof = prove_script(command, checkpoints="ckpt.json", trace=False, progress_bar=False)
    assert proof.verdict == "NOT_EXERCISED"
    assert "the run's folder, which holds nothing; the command wrote elsewhere" in proof.reason


CLIPS = """\
import json, os, sys
path = os.path.join(sys.argv[1], "ckpt.json")
state = {"step": 0, "model": {"weight": [1.0, 2.0]}, "clip": 1.0}
if os.path.exists(path):
    state = {**json.load(open(path)), "clip": 1.0}  # the bug
while state["step"] < 4:
    state["model"]["weight"] = [w - 0.1 * state["clip"] * (w - 3.0) for w in state["model"]["weight"]]
    state["clip"] *= 0.5
    state["step"] += 1
    with open(path + ".tmp", "w") as file:
        json.dump(state, file)
    os.replace(path + ".tmp", path)
"""


@needs_strace
def test_a_number_that_a_script_keeps_for_itself_is_named_with_both_its_values():
    proof = prove_script([sys.executable, "-c", CLIPS, "{dir}"], checkpoints="ckpt.json", only=["checkpoint-2"],
                         progress_bar=False)
    assert proof.verdict == "DIVERGENT"
    told = {suspect.name: suspect.reason for suspect in proof.worst.diagnosis.suspects}
    assert "clip is 0.5 where the direct run has 0.125" in told["clip"]


@needs_strace
def test_a_drift_of_the_threads_is_laid_on_the_environment():
    command = [sys.executable, str(TRAINERS / "threads_loop.py"), "--out", "{dir}"]
    prove_drift = functools.partial(prove_script, checkpoints="ckpt.pt", only=["checkpoint-1"], progress_bar=False)
    found = prove_drift([*command, "--drift"])
    assert found.verdict == "DIVERGENT", found
    suspects = found.worst.diagnosis.suspects
    assert [suspect.name for suspect in suspects] == ["environment"] and "threads" in suspects[0].reason
    assert prove_drift(command).verdict == "EQUIVALENT"


# How checkpoints are written, as the kernel saw it


@needs_strace
@pytest.mark.parametrize(("how", "kinds"), [
    ("safe", []), ("in place", ["written in place"]), ("no file sync", ["file not synced"]),
    ("no parent sync", ["folder not synced"]), ("folder renamed", []),
    ("folder in place", ["written in place", "file not synced", "folder not synced"]),
    ("native", ["written in place", "file not synced", "folder not synced"])])
def test_what_a_power_cut_would_punish_is_found_in_the_system_calls(how, kinds):
    proof = count(how, *(["--pause", "0.2"] if how == "native" else []), only=["checkpoint-1", "checkpoint-2"])
    assert [finding.kind for finding in proof.findings] == kinds
    assert proof.verdict == "EQUIVALENT", proof  # a kill is not a power cut


def test_a_random_moment_after_the_last_checkpoint_is_drawn_nearer():
    proof = count("safe", "--pause", "0.2", "--linger", "2", kills=["random"], random_kills=3)
    assert [row.outcome for row in proof.rows] == ["equal"] * 3, proof


@needs_strace
@pytest.mark.parametrize("how", ["elsewhere", "beside", "process number"])
def test_a_temporary_name_that_no_other_run_has_keeps_no_kill_from_its_place(how):
    proof = count(how, kills=["checkpoints", "chain"])
    assert proof.verdict == "EQUIVALENT", proof
    assert [(row.point, row.outcome, row.kills) for row in proof.rows] == [
        ("checkpoint-1", "equal", 1), ("checkpoint-2", "equal", 1), ("checkpoint-3", "equal", 1),
        ("chain-3", "equal", 3)]


@pytest.mark.parametrize("number", [7, 4229, 31337, 4194303])
def test_a_file_that_is_written_elsewhere_is_seen_whatever_the_number_of_the_process(number, tmp_path):
    root, thread = tmp_path / "out", f"{number:<5}"  # strace pads the number to five columns
    (tmp_path / "calls").write_text(
        f'{thread} openat(AT_FDCWD<{tmp_path}>, "/tmp/tmpab", O_RDWR|O_CREAT, 0600) = 3</tmp/tmpab>\n'
        f'{thread} write(3</tmp/tmpab>, ""..., 5) = 5\n'
        f'{thread} rename("/tmp/tmpab", "{root}/ckpt") = 0\n')
    calls = script_proof._read_calls(tmp_path / "calls", root, tmp_path)
    assert [call.name for call in calls] == ["openat", "write", "rename"]


@needs_strace
def test_a_kill_in_the_middle_of_a_write_in_place_leaves_a_torn_checkpoint():
    proof = count("in place", kills=["events"])
    assert proof.verdict == "ERROR"
    assert any("a torn checkpoint was there" in row.detail for row in proof.rows if row.outcome == "error")


@needs_strace
def test_a_full_disk_that_a_script_says_nothing_of_is_found():
    loud, quiet = count("safe", kills=["disk full"]), count("quiet", "--steps", "3", kills=["disk full"])
    assert [row.outcome for row in loud.rows] == ["equal"]  # it failed, and went on when there was room
    assert loud.verdict == "EQUIVALENT"
    assert quiet.verdict == "ERROR" and "full disk unnoticed" in [finding.kind for finding in quiet.findings]


def test_a_full_disk_under_the_proof_itself_is_loud(monkeypatch):
    usage = shutil._ntuple_diskusage(10 << 20, 10 << 20, 1000)
    monkeypatch.setattr(script_proof.shutil, "disk_usage", lambda path: usage)
    proof = count("safe", only=["checkpoint-1"], trace=None)
    assert proof.verdict == "ERROR" and "is full" in proof.reason and "give another directory" in proof.reason


def test_where_system_calls_are_not_seen_the_report_says_so():
    proof = prove("", "--pause", "0.15", trace=False, kills=["checkpoints"], max_checkpoints=1)
    assert proof.verdict == "EQUIVALENT", proof
    assert proof.observed and "durability: not observed" in str(proof) and proof.findings == ()


# Processes


@needs_strace
def test_a_kill_takes_with_it_what_left_the_process_group(tmp_path):
    proof = count("escapes", only=["checkpoint-2"], directory=tmp_path / "runs")
    pids = [int(pid) for file in tmp_path.rglob("helper.pid") for pid in file.read_text().split()]
    assert proof.verdict == "EQUIVALENT" and len(pids) == 4  # two direct runs, the killed process and the resumed one
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}") and "sleep" in
                Path(f"/proc/{pid}/cmdline").read_text()]


@needs_strace
def test_a_command_of_its_own_resumes_from_the_newest_checkpoint():
    command = [sys.executable, str(TRAINERS / "counting.py"), "--out", "{dir}"]
    proof = prove_script(command, checkpoints="ckpt.json", resume_command=[*command, "--resume", "{checkpoint}"],
                         only=["checkpoint-2"], progress_bar=False)
    assert proof.verdict == "EQUIVALENT" and "--resume-command" in proof.rows[0].command


@needs_strace
def test_a_script_that_takes_no_folder_is_run_in_one(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text((TRAINERS / "counting.py").read_text())
    monkeypatch.chdir(tmp_path)
    proof = prove_script([sys.executable, "train.py"], checkpoints="out/ckpt.json", only=["checkpoint-2"],
                         progress_bar=False)
    assert proof.verdict == "EQUIVALENT", proof
    assert not (tmp_path / "out").exists()  # nothing was written beside the script


# Reading checkpoints


class Planted:
    "An object that runs a command when it is unpickled."

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_reading_a_hostile_checkpoint_runs_nothing_unless_it_is_trusted(tmp_path):
    trap = tmp_path / "trap"
    torch.save({"weight": torch.ones(2), "trap": Planted(trap)}, tmp_path / "a.pt")
    with CheckpointReader() as reader:
        leaves = reader.tree(tmp_path / "a.pt", tmp_path).leaves
    assert not trap.exists() and any("posix.system" in text for text in leaves.values())
    with CheckpointReader(trust=True) as reader:
        reader.tree(tmp_path / "a.pt", tmp_path)
    assert trap.exists()


def test_one_flipped_bit_is_found_in_every_form_of_checkpoint(tmp_path):
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    def write(folder, weight):
        folder.mkdir()
        torch.save({"model": {"weight": weight}, "step": 3}, folder / "a.pt")
        torch.save({"weight": weight, "arguments": Planted("nowhere")}, folder / "b.pt")
        save_file({"weight": weight}, folder / "a.safetensors")
        torch.save({"rng": weight.numpy()}, folder / "c.pt")
        with pytest.warns(UserWarning):
            dcp.save({"model": {"weight": weight}}, checkpoint_id=folder / "distributed")
        (folder / "many").mkdir()
        save_file({"weight": weight}, folder / "many" / "a.safetensors")

    weight = torch.arange(6.0).reshape(2, 3)
    flipped = weight.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    write(tmp_path / "x", weight), write(tmp_path / "y", weight), write(tmp_path / "z", flipped)
    where = {"a.pt": "model.weight", "a.safetensors": "weight", "c.pt": "rng", "distributed": "model.weight",
             "many": "a.safetensors:weight"}
    with CheckpointReader() as reader:
        for name in (*where, "b.pt"):
            x, y, z = (reader.tree(tmp_path / run / name, tmp_path / run) for run in "xyz")
            assert x == y and x.digest != z.digest, name
            if name in where:
                paths = [(tmp_path / run / name, tmp_path / run) for run in "xz"]
                size = reader.differences(*paths, where=[where[name]])[where[name]]
                assert (size["max_ulp"], size["share"]) == (1, 1 / 6), name


def test_a_torn_file_is_named_and_does_not_end_the_reader(tmp_path):
    torch.save({"weight": torch.ones(1000)}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-100])
    (tmp_path / "c.pt").touch()
    with CheckpointReader() as reader:
        assert "cut off" in reader.tree(tmp_path / "b.pt", tmp_path).unread[""]
        assert "empty" in reader.tree(tmp_path / "c.pt", tmp_path).unread[""]
        assert reader.tree(tmp_path / "a.pt", tmp_path).unread == {}


def test_the_names_of_runs_folders_do_not_count_as_differences(tmp_path):
    for run in ("run-1", "run-2"):
        (tmp_path / run).mkdir()
        torch.save({"best": f"{tmp_path}/{run}/best.pt"}, tmp_path / run / "a.pt")
    with CheckpointReader() as reader:
        one, two = (reader.tree(tmp_path / run / "a.pt", tmp_path / run) for run in ("run-1", "run-2"))
    assert one == two and one.leaves == {"best": "'{dir}/best.pt'"}


# The report, and what is refused


@needs_strace
def test_the_report_is_json_and_junit_and_names_a_command_for_each_row():
    proof = prove("generator not restored", only=["checkpoint-1", "checkpoint-2"])
    plain = json.loads(proof.to_json())
    assert plain["verdict"] == "DIVERGENT" and plain["rows"][0]["diagnosis"]["suspects"][0]["name"] == "generator"
    suite = xml.etree.ElementTree.fromstring(proof.to_junit()).find("testsuite")
    assert len(suite.findall("testcase")) == len(suite.findall("testcase/failure")) == 3 == int(suite.get("failures"))
    assert "again: fttl prove-script" in suite.findall("testcase/failure")[1].text
    assert "--only=checkpoint-1" in proof.rows[0].command and "--steps-flag=--steps" in proof.rows[0].command


def pasted(command, folder):
    "Run a printed command in a shell, and give the row that it is about."
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(command.replace(" -- ", " --json -- ", 1), shell=True, cwd=folder, capture_output=True,
                          text=True, env={**os.environ, "PATH": path}, timeout=300)
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    return row


@needs_strace
@pytest.mark.parametrize(("bug", "wishes", "point"), [
    ("generator not restored", {"only": ["checkpoint-2"], "chain": 2}, "checkpoint-2"),
    ("momentum not restored", {"kills": ["events"], "max_events": 3, "seed": 4, "environment": {"WHY": "it's a test"}},
     "event-"),
    ("batch repeated", {"kills": ["chain", "disk full"], "chain": 2, "ignore": ["ema.*", "rng"]}, "chain-2")])
def test_a_printed_command_kills_the_same_run_at_the_same_place_again(bug, wishes, point, tmp_path):
    proof = prove(bug, **wishes)
    row = next(row for row in proof.rows if row.outcome == "different" and row.point.startswith(point))
    again = pasted(row.command, tmp_path)
    drawn = re.compile(r"\.tmp\w+")  # a library's temporary file has another name each time
    assert (again["point"], again["outcome"]) == (row.point, "different")
    assert drawn.sub("", again["place"]) == drawn.sub("", row.place)
    if row == proof.worst:  # where it begins is looked for in the first row alone
        assert again["diagnosis"]["tensor"] == row.diagnosis.tensor and again["diagnosis"]["step"] == row.diagnosis.step


@pytest.mark.parametrize(("wishes", "told"), [
    ({"kills": ["nowhere"]}, "kills: expected some of"), ({"checkpoints": ""}, "checkpoints: expected globs"),
    ({"checkpoints": ["/elsewhere/*.pt"]}, "which .dir. names, got /elsewhere/"),
    ({"checkpoints": "../*.pt"}, "which .dir. names, got [.][.]/"),
    ({"steps": 3}, "expected both or none"), ({"chain": 0}, "at least 1"),
    ({"steps": 0, "steps_flag": "--steps"}, "at least 1")])
def test_impossible_wishes_are_refused_before_anything_runs(wishes, told):
    with pytest.raises(ValueError, match=told):
        count(**wishes)


@pytest.mark.parametrize("trace", [None, False])
def test_a_kill_point_that_the_run_does_not_have_is_refused_with_those_that_it_has(trace):
    with pytest.raises(ValueError, match="only: expected some of checkpoint-1, .*got lunch, checkpoint-99$"):
        count(only=["lunch", "checkpoint-1", "checkpoint-99", "checkpoint-*"], trace=trace)


def test_a_proof_without_a_kill_says_so():
    proof = count(kills=["random"], random_kills=0)
    assert proof.verdict == "NOT_EXERCISED" and "have no place in this run" in proof.reason


def test_a_program_that_is_not_there_and_a_folder_in_use_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a program that can be started"):
        prove_script(["no-such-program"], checkpoints="*")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="expected an empty or a new folder"):
        count(directory=tmp_path)


def test_the_scripts_here_run_by_themselves(tmp_path):
    for name in ("numpy_loop.py", "counting.py"):
        subprocess.run([sys.executable, TRAINERS / name, "--out", tmp_path / name], check=True)
        assert list((tmp_path / name).iterdir())
