"""Certificates: what they hold, what a check notices, and what a signature is over."""

import base64
import functools
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fault_tolerant_transformer_lab.certificate import (
    CertificateError,
    certificate,
    check_certificate,
    code_identity,
    load_target,
    read_certificate,
    root_of,
    sign_certificate,
    target_of,
    verify_signature,
    write_certificate,
)
from fault_tolerant_transformer_lab.config import ExperimentConfig
from fault_tolerant_transformer_lab.equivalence import Proof, example_run, prove_restart, prove_training

QUICK = {"steps": 3, "interrupt_at": [2], "how": "clean", "in_process": True, "resumes": 1, "progress_bar": False}


@pytest.fixture(scope="module")
def proof() -> Proof:
    return prove_restart(example_run, **QUICK)


@pytest.fixture
def path(proof: Proof, tmp_path: Path) -> Path:
    return write_certificate(certificate(proof, example_run), tmp_path / "certificate.json")


def test_a_certificate_says_what_was_proven_about_what(path: Path, proof: Proof) -> None:
    document = read_certificate(path)
    assert document["verdict"] == "EQUIVALENT" and document["mode"] == "full" and document["steps"] == 3
    assert document["interrupted"] == [{"point": "clean@2", "where": "step 2, step boundary", "how": "clean stop",
                                        "replayed": 0, "outcome": "equal"}]
    assert document["left_out"] == dict.fromkeys(("model", "optimizer", "passes", "progress", "rng"), "caught")
    assert document["identity"] and document["environment"]["threads"] == 1 and document["asked"]["steps"] == 3
    by_hand = hashlib.sha256("".join(f"{line}\n" for line in proof.facts["step_digests"]).encode()).hexdigest()
    assert document["root"] == by_hand and len(document["digests"]) == 4 and len(set(document["digests"])) == 4
    source = Path(example_run.__code__.co_filename)
    assert document["code"]["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()


def test_flags_asked_for_as_numbers_are_certified_as_what_they_meant(tmp_path: Path) -> None:
    proof = prove_restart(example_run, **{**QUICK, "in_process": 1, "knock_out": 0})
    asked = read_certificate(write_certificate(certificate(proof, example_run), tmp_path / "it.json"))["asked"]
    assert (asked["in_process"], asked["knock_out"]) == (True, False)


def test_equal_proofs_give_equal_bytes(path: Path, tmp_path: Path) -> None:
    again = certificate(prove_restart(example_run, **QUICK), example_run)
    assert write_certificate(again, tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_the_commit_and_whether_it_is_clean_are_on_record(tmp_path: Path) -> None:
    git = functools.partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True)
    module = tmp_path / "trainer_under_git.py"
    module.write_text("def make_run(directory):\n    return None\n")
    git(["git", "init", "-q"])
    git(["git", "add", "."])
    git(["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "-qm", "x"])
    sys.path.insert(0, str(tmp_path))
    try:
        make_run = load_target({"function": "trainer_under_git:make_run"})
        clean = code_identity(make_run)
        module.write_text(module.read_text() + "# changed\n")
        dirty = code_identity(make_run)
    finally:
        sys.path.remove(str(tmp_path))
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    head = git(["git", "rev-parse", "HEAD"]).stdout.decode().strip()
    assert clean["commit"] == dirty["commit"] == head and (clean["dirty"], dirty["dirty"]) == (False, True)
    assert clean["sha256"] != dirty["sha256"]


def test_a_check_does_it_again_and_confirms(path: Path) -> None:
    checked = check_certificate(path, progress_bar=False)
    assert checked.confirmed and checked.findings == () and str(checked) == "confirmed: EQUIVALENT"


def changed(path: Path, **changes: object) -> Path:
    document = json.loads(path.read_text()) | changes
    return write_certificate(document, path.with_name("changed.json"))


def test_a_trainer_that_has_changed_is_noticed_at_its_first_step(path: Path) -> None:
    target = {"kind": "run", "function": f"{__name__}:another_run", "arguments": {}}
    checked = check_certificate(changed(path, target=target), progress_bar=False)
    assert not checked.confirmed and checked.proof.verdict == "EQUIVALENT"  # it still resumes; it is another run
    assert any("bits: other ones from step 2 on, on the same settings" in finding for finding in checked.findings)
    assert any("code: test_certificate.py is not the file" in finding for finding in checked.findings)


def another_run(directory: Path):
    run = example_run(directory)
    advance = run.advance

    def louder() -> float:
        if run.progress.step == 1:
            run.model[0].weight.data.mul_(1.5)
        return advance()

    run.advance = louder
    return run


def test_a_bug_that_came_in_since_is_a_divergence(path: Path) -> None:
    target = {"kind": "run", "function": "fault_tolerant_transformer_lab.equivalence:example_run",
              "arguments": {"fault": "batch repeated"}}
    checked = check_certificate(changed(path, target=target), progress_bar=False)
    assert not checked.confirmed and checked.findings[0].startswith("verdict: certified EQUIVALENT, now DIVERGENT")


@pytest.mark.parametrize("name", ["interrupted", "left_out", "steps", "mode", "identity", "description"])
def test_a_claim_that_doing_it_again_does_not_show_is_not_confirmed(path: Path, name: str) -> None:
    document = json.loads(path.read_text())
    more = {"interrupted": [*document["interrupted"], {**document["interrupted"][0], "how": "SIGKILL"}],
            "left_out": {**document["left_out"], "average": "caught"}, "steps": 300, "mode": "whole",
            "identity": {"example": "another"}, "description": {"example": "another"}}
    checked = check_certificate(changed(path, **{name: more[name]}), progress_bar=False)
    assert not checked.confirmed and checked.findings == (f"{name}: not what doing it again shows",)


def test_one_altered_character_anywhere_is_noticed(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    lines = [at for at, byte in enumerate(data) if chr(byte).isalnum()]
    for at in lines[::max(1, len(lines) // 300)]:
        altered = tmp_path / "altered.json"
        altered.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
        with pytest.raises(CertificateError, match="changed after it was written|expected"):
            read_certificate(altered)


def test_a_certificate_of_a_failure_confirms_nothing(tmp_path: Path) -> None:
    faulty = functools.partial(example_run, fault="generator lost")
    written = write_certificate(certificate(prove_restart(faulty, **QUICK), faulty), tmp_path / "c.json")
    checked = check_certificate(written, progress_bar=False)
    assert not checked.confirmed and "the certified verdict is DIVERGENT" in checked.findings


def test_the_labs_own_loop_is_certified_with_its_configuration(tmp_path: Path) -> None:
    config = ExperimentConfig(vocab_size=64, block_size=8, d_model=8, n_heads=2, n_layers=1, dropout=0.1, seed=5,
                              steps=2, batch_size=2, learning_rate=1e-2, checkpoint_every=1)
    proof = prove_training(config, interrupt_at=[1], how="clean", resumes=1, knock_out=False, jobs=2,
                           progress_bar=False)
    document = certificate(proof, config)
    assert document["target"] == {"kind": "training", "config": config.describe()}
    checked = check_certificate(write_certificate(document, tmp_path / "c.json"), jobs=2, progress_bar=False)
    assert checked.confirmed, str(checked)


@pytest.mark.parametrize(("content", "message"), [
    ("not JSON", "expected a certificate, a file of JSON"),
    ("[]", "expected a fttl restart certificate of schema version 1, got 'list'"),
    ('{"format": "fttl restart certificate", "schema_version": 2}', "of schema version 1, got one of 2"),
    ("[" * 100_000, "expected a certificate, a file of JSON"),
    ('{"format": "fttl restart certificate", "schema_version": 1}', "expected asked, target, code, verdict too"),
])
def test_what_is_no_certificate_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(CertificateError, match=message):
        read_certificate(tmp_path / "c.json")


@pytest.mark.parametrize(("part", "value", "message"), [
    ("target", "a text", "expected a target of kind run or training, got 'a text'"),
    ("target", {"function": "a:b"}, "expected a target of kind run or training"),
    ("target", {"kind": "run", "function": 12}, "expected a target with a function's name, got 12"),
    ("target", {"kind": "run", "function": "a:b", "arguments": [1]}, "target.arguments to be an object"),
    ("target", {"kind": "training"}, "target.config to be an object, got None"),
    ("asked", [1], "asked to be an object"),
    ("asked", {"steps": 2, "of_a_later_version": 1}, "arguments of prove_restart, got 'of_a_later_version'"),
    ("asked", {"steps": 2, "jobs": 1}, "arguments of prove_restart, got 'jobs'"),
    ("asked", {"how": ["clean"]}, "the argument steps of prove_restart, got none"),
    ("asked", {"steps": "2"}, "arguments as prove_restart takes them, got steps='2'"),
    ("asked", {"steps": True}, "got steps=True"),
    ("asked", {"steps": 2, "points": [3]}, r"got points=\[3\]"),
    ("asked", {"steps": 2, "expendable": "run"}, "got expendable='run'"),
    ("asked", {"steps": 2, "mode": None}, "got mode=None"),
    ("asked", {"steps": 2, "in_process": 1}, "got in_process=1"),
    ("asked", {"steps": 2, "interrupt_at": ["2"]}, r"got interrupt_at=\['2'\]"),
    ("code", "a text", "code to be an object"),
    ("environment", [1], "environment to be an object"),
])
def test_a_certificate_of_another_shape_is_refused_though_its_digest_is_right(path, part, value, message) -> None:
    document = {**json.loads(path.read_text()), part: value}
    with pytest.raises(CertificateError, match=message):
        check_certificate(write_certificate(document, path))


def test_a_folder_in_place_of_a_certificate_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CertificateError, match=r"^\.: expected a certificate"):
        read_certificate(".")


def test_a_changed_digest_is_noticed_without_running_anything(path: Path) -> None:
    document = json.loads(path.read_text())
    document["digests"][1] = document["digests"][2]
    path.write_text(json.dumps(document))
    with pytest.raises(CertificateError, match="its root is not that of its digests"):
        check_certificate(path)
    assert root_of([]) == hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize("target", ["nothing", "no.such.module:f", f"{__name__}:missing", ":f", ".a:f",
                                    "os:sep", "time:sleep"])
def test_a_function_that_is_not_there_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="expected a module and a function that can be imported"):
        load_target({"function": target})


class Maker:
    def __call__(self, directory: Path) -> None: ...


def of_a_script(directory: Path) -> None: ...


def test_only_importable_functions_are_certified(proof: Proof) -> None:
    of_a_script.__module__ = "__main__"  # as where it stands in the script that was started
    for make_run in (lambda directory: None, functools.partial(example_run, fault=object()), Maker(), of_a_script, 3,
                     None):
        with pytest.raises(ValueError, match="expected a function at the top of an importable module"):
            certificate(proof, make_run)
    assert target_of(functools.partial(example_run, fault="x"))["arguments"] == {"fault": "x"}


class TestSigned:
    @pytest.fixture
    def keys(self, tmp_path: Path) -> tuple[Path, Path]:
        pytest.importorskip("cryptography")
        if shutil.which("openssl") is None:
            pytest.skip("no openssl")
        private, public = tmp_path / "key.pem", tmp_path / "public.pem"
        for arguments in (["genpkey", "-algorithm", "ed25519", "-out", private],
                          ["pkey", "-in", private, "-pubout", "-out", public]):
            subprocess.run(["openssl", *arguments], check=True, capture_output=True)
        return private, public

    def test_every_changed_byte_of_a_signed_certificate_is_noticed(self, path: Path, keys: tuple[Path, Path]) -> None:
        envelope = sign_certificate(path, keys[0])
        assert len(verify_signature(path, keys[1])) == 64
        original = path.read_bytes()
        for position in range(0, len(original), max(1, len(original) // 40)):
            path.write_bytes(original[:position] + bytes([original[position] ^ 1]) + original[position + 1:])
            with pytest.raises(CertificateError):
                verify_signature(path, keys[1])
        path.write_bytes(original)
        forged = json.loads(envelope.read_text())
        signature = bytearray(base64.b64decode(forged["signatures"][0]["sig"]))
        signature[5] ^= 1
        forged["signatures"][0]["sig"] = base64.b64encode(signature).decode()
        envelope.write_text(json.dumps(forged))
        with pytest.raises(CertificateError, match="none of those in its envelope is"):
            verify_signature(path, keys[1])

    def test_keys_of_another_kind_are_refused(self, path: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
        other = tmp_path / "p256.pem"
        subprocess.run(["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", other],
                       check=True, capture_output=True)
        with pytest.raises(CertificateError, match="expected an Ed25519 private key"):
            sign_certificate(path, other)
        with pytest.raises(CertificateError, match="expected an Ed25519 private key"):
            sign_certificate(path, keys[1])
        with pytest.raises(CertificateError, match="expected a DSSE envelope beside it"):
            verify_signature(path, keys[1])
