"""Sharded generations under attack: kills of three ranks, forged plans, exchanged files, orphans, rivals."""

import base64
import dataclasses
import errno
import io
import itertools
import json
import os
import pickle
import pickletools
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fault_tolerant_transformer_lab import sharded
from fault_tolerant_transformer_lab.checkpoint_file import CheckpointCorruptError, UnknownSchemaError
from fault_tolerant_transformer_lab.config import load_config, shipped_config
from fault_tolerant_transformer_lab.contract import CheckpointError, Contract, ContractError
from fault_tolerant_transformer_lab.distributed import LocalShards, RankRun, run_ranks
from fault_tolerant_transformer_lab.launch import digest_of_checkpoint, outlive_launcher, train_rank
from fault_tolerant_transformer_lab.publication import CheckpointLockedError, CheckpointStore, Disk
from fault_tolerant_transformer_lab.sharded import (
    INDEX,
    Inert,
    RankStore,
    ShardedTensor,
    export_checkpoint,
    import_checkpoint,
    new_attempt,
    read_attempt,
    read_generation,
    read_inert,
    read_torch_save,
    verify_generation,
)
from fault_tolerant_transformer_lab.training import deterministic

TINY = load_config(shipped_config("smoke")).replace(
    grad_accumulation=6, batch_size=1, n_layers=1, d_model=8, n_heads=1)


def steps(folder, *wanted, disk=None, **options):
    "A function for `run_ranks`: go on from what is there, save at the steps wanted, tell what was raised."
    def _run(ranks):
        told = []
        with deterministic(threads=1), RankStore(folder, ranks, disk=disk and disk(ranks), **options) as store:
            run = RankRun(TINY, ranks, "fsdp")
            if store.generations():
                store.restore(run.contract)
            while run.progress.step < max(wanted):
                run.advance()
                if run.progress.step in wanted:
                    try:
                        told.append(store.save(run.contract).state_digest)
                    except CheckpointError as error:
                        told.append(f"{type(error).__name__}: {error}")
        return told
    return _run


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    "A store of three ranks with step 1, and the digests of steps 1 and 2."
    folder = tmp_path_factory.mktemp("origin")
    (one,), _, _ = run_ranks(steps(folder / "checkpoints", 1), 3)
    shutil.copytree(folder / "checkpoints", folder / "both")
    (two,), _, _ = run_ranks(steps(folder / "both", 2), 3)
    return folder, one, two


@pytest.fixture
def store(origin, tmp_path):
    "A copy of the store with step 1."
    return shutil.copytree(origin[0] / "checkpoints", tmp_path / "checkpoints")


class Killer(Disk):
    "Ends the process before the n-th operation on something of step 2; 0: before the one that follows its rename."

    def __init__(self, nth):
        super().__init__()
        self.nth, self.n, self.renamed = nth, 0, False

    def operation(self, name, path, call):
        concerned = "step-00000002" in f"{path}"
        self.n += concerned
        if (self.renamed if self.nth == 0 else concerned and self.n == self.nth):
            os.kill(os.getpid(), signal.SIGKILL)
        self.renamed |= concerned and name == "replace"
        return call()


@pytest.mark.parametrize(("rank", "nth", "found"), [(2, 2, 1), (1, 5, 1), (0, 1, 1), (0, 11, 1), (0, 0, 2)])
def test_a_kill_of_any_of_three_ranks_leaves_a_whole_generation_and_the_next_save_works(
        origin, store, rank, nth, found):
    disk = lambda ranks: Killer(nth) if ranks.rank == rank else None  # noqa: E731
    outcomes = run_ranks(steps(store, 2, disk=disk), 3, check=False)
    assert (outcomes[0].rank, outcomes[0].exit_code) == (rank, -signal.SIGKILL)
    _, one, two = origin
    newest = max(store.glob("step-*"))
    assert verify_generation(newest).state_digest == {1: one, 2: two}[found]
    assert run_ranks(steps(store, 2), 3) == [[two] if found == 1 else []] * 3
    assert verify_generation(store / "step-00000002").state_digest == two
    assert not list(store.glob(".*.tmp"))


class Exchanger(Disk):
    "Moves the store away when step 2 has its name there, and puts a rival in its place."

    def __init__(self, store, rival):
        super().__init__()
        self.store, self.rival, self.renamed = store, rival, False

    def operation(self, name, path, call):
        result = call()
        if self.renamed and name == "sync_directory":
            self.renamed = False
            self.store.rename(self.store.parent / "moved")
            self.rival.rename(self.store)
        self.renamed |= name == "replace" and call.target is not None and call.target.name == "step-00000002"
        return result


def test_a_store_exchanged_between_publication_and_retention_keeps_its_generations(origin, store, tmp_path):
    rival = shutil.copytree(origin[0] / "both", tmp_path / "rival")
    disk = lambda ranks: Exchanger(store, rival) if ranks.is_first else None  # noqa: E731
    told = run_ranks(steps(store, 2, disk=disk, keep_last=1), 3)
    for (message,) in told:
        assert "moved or deleted" in message and "step-00000002 is published and durable" in message
    for folder in (tmp_path / "moved", store):
        assert {"step-00000001", "step-00000002"} <= set(os.listdir(folder))


def is_pickle(data, followed=False):
    "Whether bytes are a pickle of any protocol, or `torch.save`'s; followed: an old one too, which has no mark."
    if zipfile.is_zipfile(io.BytesIO(data)):
        return True
    with suppress(ValueError, IndexError):
        operations = list(pickletools.genops(data))
        return followed or data.startswith(b"\x80") or (len(operations) > 1 and operations[-1][2] == len(data) - 1)
    return False


def texts_in(node):
    "Every text in what JSON holds, keys among them."
    if isinstance(node, str):
        yield node
        with suppress(ValueError):
            yield from texts_in(json.loads(node)) if node[:1] in "[{" else ()
    elif isinstance(node, dict | list):
        for part in [*node, *node.values()] if isinstance(node, dict) else node:
            yield from texts_in(part)


def bytes_of(text):
    "What bytes a text may stand for: its own, one for each character, or base64."
    for decode in (str.encode, partial(str.encode, encoding="latin-1"), partial(base64.b64decode, validate=True)):
        with suppress(ValueError):
            yield decode(text)


def pickles_in(path):
    "What of a file is a pickle: all of it, the bytes of a tensor, or bytes that stand as text in its JSON."
    data = path.read_bytes()
    found, texts = [path.name] if is_pickle(data, followed=True) else [], []
    if path.suffix == ".safetensors":
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + length])
        texts = [*texts_in(header)]
        found += [name for name, entry in header.items() if name != "__metadata__"
                  and is_pickle(data[8 + length + entry["data_offsets"][0]:8 + length + entry["data_offsets"][1]])]
    elif path.suffix in (".json", ".jsonl"):
        documents = data.splitlines() if path.suffix == ".jsonl" else [data]
        texts = [text for document in documents for text in texts_in(json.loads(document))]
    return [*found, *(text for text in texts if any(map(is_pickle, bytes_of(text))))]


def test_no_byte_that_is_published_is_a_pickle(tmp_path):
    config = TINY.replace(steps=2, checkpoint_every=1, dropout=0.1)
    for mode in ("ddp", "fsdp", "elastic"):
        run_ranks(lambda ranks, m=mode: train_rank(config, tmp_path / m, ranks, parallel=m).steps, 2)
    export_checkpoint(tmp_path / "fsdp" / "checkpoints" / "step-00000002", tmp_path / "one.safetensors")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    assert {path.suffix for path in files} >= {".safetensors", ".json", ".jsonl"} and len(files) > 20
    assert [found for path in files for found in pickles_in(path)] == []


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_found_wherever_it_is_hidden(tmp_path, protocol):
    pickled = pickle.dumps({"a": 1}, protocol)
    (tmp_path / "plain").write_bytes(pickled)
    (tmp_path / "followed").write_bytes(pickled + b"more")
    torch.save({"a": torch.ones(1)}, tmp_path / "saved")
    tree = json.dumps({"a": {"$bytes": base64.b64encode(pickled).decode()}})
    save_file({"hidden": torch.frombuffer(bytearray(pickled), dtype=torch.uint8)}, tmp_path / "t.safetensors")
    save_file({"sound": torch.ones(1)}, tmp_path / "m.safetensors", {"state": tree})
    (tmp_path / "j.json").write_text(tree)
    (tmp_path / "l.jsonl").write_text(f"{{}}\n{tree}\n")
    (tmp_path / "key.json").write_text(json.dumps({base64.b64encode(pickled).decode(): 1}))
    (tmp_path / "text.json").write_text(json.dumps({"a": pickled.decode("latin-1")}))
    assert all(len(pickles_in(path)) == 1 for path in tmp_path.iterdir()), [*map(pickles_in, tmp_path.iterdir())]


def test_retention_keeps_the_last_and_multiples_and_leaves_no_rest(tmp_path):
    run_ranks(steps(tmp_path / "s", 1, 2, 3, 4, 5, keep_last=1, keep_every=2), 2)
    assert sorted(os.listdir(tmp_path / "s")) == [".attempt", ".lock", "step-00000002", "step-00000004",
                                                  "step-00000005"]


def test_a_step_saved_again_is_left_and_another_state_of_it_is_refused(tmp_path):
    def again(ranks):
        with deterministic(threads=1), RankStore(tmp_path / "s", ranks) as store:
            run = RankRun(TINY, ranks, "fsdp")
            run.advance()
            first = store.save(run.contract)
            inode = os.stat(first.path).st_ino
            same = store.save(run.contract)
            with torch.no_grad():
                run.model.norm.bias.to_local().add_(1)
            try:
                store.save(run.contract)
            except CheckpointError as error:
                return [first.state_digest == same.state_digest, inode == os.stat(first.path).st_ino, str(error)]

    for same, kept, said in run_ranks(again, 2):
        assert same and kept and "published with another state" in said


def test_ranks_that_have_drifted_apart_are_refused_and_named(tmp_path):
    def drifted(ranks):
        with deterministic(threads=1), RankStore(tmp_path / "s", ranks) as store:
            run = RankRun(TINY, ranks, "fsdp")
            run.advance()
            if ranks.rank == 1:
                run.progress.losses[0] += 1
            try:
                store.save(run.contract)
            except CheckpointError as error:
                return [str(error), sorted(os.listdir(tmp_path / "s"))]

    for said, left in run_ranks(drifted, 2):
        assert "rank 1 has another shared state than rank 0 at step 1" in said
        assert left == [".attempt", ".lock"]


def test_going_back_sets_later_generations_aside(origin, tmp_path):
    folder = shutil.copytree(origin[0] / "both", tmp_path / "both")

    def back(ranks):
        with deterministic(threads=1), RankStore(folder, ranks) as store:
            run = RankRun(TINY, ranks, "fsdp")
            store.restore(run.contract, step=1)
            run.advance()
            return store.save(run.contract).state_digest

    assert run_ranks(back, 3) == [origin[2]] * 3
    assert {"step-00000001", "step-00000002", "step-00000002.rewound"} <= set(os.listdir(folder))


def test_a_damaged_generation_is_passed_over_by_every_rank_and_kept_as_evidence(origin, tmp_path):
    folder = shutil.copytree(origin[0] / "both", tmp_path / "both")
    victim = folder / "step-00000002" / "rank-00002.safetensors"
    content = bytearray(victim.read_bytes())
    content[-3] ^= 4
    victim.write_bytes(content)
    assert run_ranks(steps(folder, 2), 3) == [[origin[2]]] * 3
    assert "step-00000002.corrupt" in os.listdir(folder)


# Forged plans: whoever can write a file can compute its digest too, so every field is checked as well.

def forged(folder, change):
    "Change the document of a plan and give it a right digest."
    path = folder / INDEX
    document = json.loads(path.read_text())["document"]
    change(document)
    text = json.dumps(document, separators=(",", ":"))
    path.write_text(f'{{"digest":"{blake3(text.encode()).hexdigest()}","document":{text}}}\n')


def first(document):
    "The first tensor that has several chunks."
    return next(t for t in document["tensors"].values() if len(t["chunks"]) > 1)


@pytest.mark.parametrize(("change", "said"), [
    (lambda d: first(d)["chunks"].pop(), "do not cover it"),
    (lambda d: first(d)["chunks"][1].update(first(d)["chunks"][0]), "overlap|do not cover"),
    (lambda d: first(d)["chunks"][0].update(sizes=[1 << 62, 1 << 62]), "outside its tensor|do not cover"),
    (lambda d: first(d)["chunks"][0].update(offsets=[-1, 0]), "whole numbers"),
    (lambda d: first(d)["chunks"][0].update(file=7), "not listed"),
    (lambda d: d["files"][0].update(name="../rank-00000.safetensors"), "not those of ranks"),
    (lambda d: d.update(step=2), "state digest"),
    (lambda d: d["tree"].update(extra={"$tensor": "nowhere"}), "malformed"),
    (lambda d: d.update(files=[]), "step and files"),
    (lambda d: d.pop("about"), "malformed"),
    (lambda d: d["files"][0].update(n_bytes="8"), "whole numbers"),
    (lambda d: d["files"][0].update(n_bytes=-1), "whole numbers"),
    (lambda d: d["files"][0].update(own_digest=None), "digests as text"),
    (lambda d: d["about"].update(config=[]), "expected objects"),
    (lambda d: d.update(attempt=7), "its number and token"),
    (lambda d: d.update(tokens_seen="many"), "tokens_seen"),
    (lambda d: first(d)["chunks"][1].update(name=first(d)["chunks"][0]["name"], file=first(d)["chunks"][0]["file"]),
     "two chunks lie in one place"),
    (lambda d: first(d)["chunks"][0].update(offsets=[0] * 70), "whole numbers"),
])
def test_a_forged_plan_is_refused(store, change, said):
    forged(store / "step-00000001", change)
    with pytest.raises(CheckpointCorruptError, match=said):
        read_generation(store / "step-00000001")


def test_a_plan_with_a_key_twice_or_with_too_many_values_is_refused(store, monkeypatch):
    path = store / "step-00000001" / INDEX
    text = path.read_text().partition('"document":')[2][:-2]
    for forgery in (text[:-1] + ',"step":1}', text[:-1] + f',"x":{"9" * 5000}}}', text[:-1] + ',"x":' + "[" * 99999):
        path.write_text(f'{{"digest":"{blake3(forgery.encode()).hexdigest()}","document":{forgery}}}\n')
        with pytest.raises(CheckpointCorruptError, match="malformed") as found:
            read_generation(path.parent)
        assert len(str(found.value)) < 400 and "\n" not in str(found.value)
    path.write_text(f'{{"digest":"{blake3(text.encode()).hexdigest()}","document":{text}}}\n')
    assert read_generation(path.parent).step == 1
    monkeypatch.setattr(sharded, "MAX_INDEX_VALUES", 100)
    with pytest.raises(CheckpointCorruptError, match="at most 100 are read"):
        read_generation(path.parent)


def test_a_plan_that_no_reader_would_take_is_not_written(store, monkeypatch):
    manifest = read_generation(store / "step-00000001")
    assert len(manifest.to_bytes()) == (store / "step-00000001" / INDEX).stat().st_size
    for limit in ("MAX_INDEX_BYTES", "MAX_INDEX_VALUES"):
        with monkeypatch.context() as patch:
            patch.setattr(sharded, limit, 200)
            with pytest.raises(ContractError, match="readers take"):
                manifest.to_bytes()


def test_a_plan_cannot_lend_a_rank_another_own_state(store):
    def change(document):
        document["files"][1]["own_digest"] = "0" * 64
        plain = read_generation(store / "step-00000001")
        files = tuple(dataclasses.replace(file, own_digest=("0" * 64) if rank == 1 else file.own_digest)
                      for rank, file in enumerate(plain.files))
        document["state_digest"] = dataclasses.replace(plain, files=files).state_digest

    forged(store / "step-00000001", change)
    assert read_generation(store / "step-00000001").files[1].own_digest == "0" * 64
    with pytest.raises(CheckpointCorruptError, match="rank-00001.*what is its rank's alone"):
        verify_generation(store / "step-00000001")


@pytest.mark.parametrize("key", ["x", 99, -1])
def test_a_moment_of_no_parameter_is_refused(key):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    shards = LocalShards(optimizer)
    state = shards.state_dict() | {"state": {key: {"exp_avg": torch.ones(1)}}}
    with pytest.raises(ContractError, match="expected the moment of one of 1 parameters"):
        shards.validate_state_dict(state)
    assert shards.like(("state", key, "exp_avg"), (1,)) is None


def test_many_chunks_are_checked_in_a_time_that_grows_as_their_number():
    n = 20_000  # beside each other in the second dimension: pairs of them would be 200 million
    boxes = [{"offsets": [0, i], "sizes": [7, 1], "file": 0, "name": f"{i}", "digest": ""} for i in range(n)]
    assert len(ShardedTensor.from_plain({"dtype": "F32", "shape": [7, n], "chunks": boxes}).chunks) == n
    boxes[5] = dict(boxes[5], offsets=[0, 6])
    with pytest.raises(ValueError, match="overlap"):
        ShardedTensor.from_plain({"dtype": "F32", "shape": [7, n], "chunks": boxes})


@settings(max_examples=100)
@given(st.data())
def test_boxes_tile_exactly_when_each_cell_is_covered_once(data):
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    box = st.tuples(*[st.integers(0, n - 1).flatmap(lambda o, n=n: st.tuples(st.just(o), st.integers(1, n - o)))
                      for n in shape])
    boxes = data.draw(st.lists(box, max_size=5))
    covered = [cell for b in boxes for cell in itertools.product(*[range(o, o + s) for o, s in b])]
    tiles = sorted(covered) == sorted(itertools.product(*[range(n) for n in shape]))
    plain = {"dtype": "F32", "shape": shape, "chunks": [
        {"offsets": [o for o, _ in b], "sizes": [s for _, s in b], "file": 0, "name": f"{i}", "digest": ""}
        for i, b in enumerate(boxes)]}
    try:
        ShardedTensor.from_plain(plain)
    except ValueError:
        assert not tiles
    else:
        assert tiles


def test_an_unknown_schema_is_named(store):
    forged(store / "step-00000001", lambda document: document.update(schema_version=2))
    with pytest.raises(UnknownSchemaError, match="schema version 2, this release reads 1"):
        read_generation(store / "step-00000001")


def test_a_sound_file_of_another_generation_is_no_part_of_this_one(origin, tmp_path):
    both = shutil.copytree(origin[0] / "both", tmp_path / "both")
    shutil.copy(both / "step-00000002" / "rank-00001.safetensors", both / "step-00000001" / "rank-00001.safetensors")
    with pytest.raises(CheckpointCorruptError, match="not the one of this generation"):
        verify_generation(both / "step-00000001")


SAID = {"missing": "rank-00001.safetensors is missing", "extra": "rank-00003.safetensors does not belong there",
        "link": "expected a directory"}


@pytest.mark.parametrize("how", SAID)
def test_a_folder_with_more_or_less_than_its_files_is_refused(store, how):
    folder = store / "step-00000001"
    if how == "missing":
        (folder / "rank-00001.safetensors").unlink()
    elif how == "extra":
        (folder / "rank-00003.safetensors").touch()
    else:
        folder.rename(store / "elsewhere")
        folder.symlink_to("elsewhere")
    with pytest.raises(CheckpointCorruptError, match=SAID[how]):
        verify_generation(folder)


def anything_but_a_file(path, how):
    "Put something at a path that is no regular file."
    path.unlink()
    if how == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
        return
    {"directory": path.mkdir, "FIFO": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("elsewhere")}[how]()


@pytest.mark.parametrize("how", ["directory", "FIFO", "link", "socket"])
def test_a_plan_that_is_no_file_is_damage_and_the_generation_before_it_is_used(origin, tmp_path, monkeypatch, how):
    both = shutil.copytree(origin[0] / "both", tmp_path / "both")
    monkeypatch.chdir(both / "step-00000002")  # a socket's path is short
    anything_but_a_file(Path(INDEX), how)
    with pytest.raises(CheckpointCorruptError, match=f"step-00000002/{INDEX}: .*; use another generation"):
        verify_generation(both / "step-00000002")
    assert sharded.newest_sound(both) == both / "step-00000001"


def test_a_reader_of_generations_that_retention_outran_looks_again(origin, tmp_path, monkeypatch):
    both, elsewhere = shutil.copytree(origin[0] / "both", tmp_path / "both"), tmp_path / "elsewhere"
    (both / "step-00000002").rename(elsewhere)
    read = sharded.open_any

    def outrun(path):  # between the reader's list and its first file
        monkeypatch.setattr(sharded, "open_any", read)
        shutil.rmtree(both / "step-00000001")
        elsewhere.rename(both / "step-00000002")
        return read(path)

    monkeypatch.setattr(sharded, "open_any", outrun)
    assert sharded.newest_sound(both) == both / "step-00000002"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_an_error_of_the_moment_does_not_condemn_a_generation_and_one_of_the_device_does(store, monkeypatch, code):
    def refuse(path, flags):
        raise OSError(code, os.strerror(code), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(CheckpointCorruptError if code == errno.EIO else OSError, match=os.strerror(code)):
            read_generation(store / "step-00000001")
    assert read_generation(store / "step-00000001").step == 1


def test_a_file_for_others_is_not_written_among_checkpoints(store, tmp_path):
    generation = store / "step-00000001"
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    for place, said in ((generation / "one.safetensors", "generation"), (store / "step-00000001.safetensors", "run"),
                        (store / "step-00000000.safetensors", "run")):
        for write, source in ((export_checkpoint, generation), (import_checkpoint, tmp_path / "w.pt")):
            with pytest.raises(CheckpointError, match=f"got one in a {said}"):
                write(source, place)
        assert not place.exists()
    verify_generation(generation)
    export_checkpoint(generation, store / "weights.safetensors")  # no name of a checkpoint
    import_checkpoint(tmp_path / "w.pt", tmp_path / "begin" / "step-00000000.safetensors")  # nobody else's folder


@settings(max_examples=80)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.data())
def test_chunks_tile_or_are_refused(shape, data):
    cut = data.draw(st.integers(0, shape[0]))
    boxes = [([0] * len(shape), [cut, *shape[1:]]), ([cut] + [0] * (len(shape) - 1), [shape[0] - cut, *shape[1:]])]
    plain = {"dtype": "F32", "shape": shape, "chunks": [
        {"offsets": offsets, "sizes": sizes, "file": 0, "name": "x", "digest": "y"} for offsets, sizes in boxes]}
    assert ShardedTensor.from_plain(plain).to_plain() == json.loads(json.dumps(plain))
    moved = data.draw(st.integers(1, 4))
    plain["chunks"][1] = dict(plain["chunks"][1], offsets=[cut + moved, *boxes[1][0][1:]])
    if boxes[1][1][0] and all(shape):
        with pytest.raises(ValueError, match="outside|overlap|cover"):
            ShardedTensor.from_plain(plain)


# Who may publish.

def test_a_run_of_one_process_that_has_gone_on_fences_ranks_that_write_no_more_in_its_place(tmp_path):
    def fenced(ranks):
        with deterministic(threads=1), RankStore(tmp_path / "s", ranks) as store:
            run = RankRun(TINY, ranks, "ddp")
            run.advance()
            store.save(run.contract)
            plain = torch.nn.Linear(2, 2)
            with CheckpointStore(tmp_path / "s") as other:
                other.save(Contract(model=plain), step=9)
            run.advance()
            try:
                store.save(run.contract)
            except CheckpointError as error:
                return f"{type(error).__name__}: {error}"

    (said,) = run_ranks(fenced, 1)
    assert said.startswith("FencedError") and "has step 9 as its newest, and this attempt last saw 1" in said


class TakenOver(Disk):
    "Has a newer attempt begin, which removes what this one was writing, when a rank opens the folder for its part."

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def operation(self, name, path, call):
        if (name, path.suffix, self.rank) == ("open_directory", ".tmp", 1):
            newer = dataclasses.replace(read_attempt(path.parent), number=2, token="0" * 32)
            (path.parent / ".attempt").write_text(json.dumps(newer.to_plain()))
            shutil.rmtree(path)
        return call()


def test_a_newer_attempt_is_the_cause_where_it_has_removed_a_part(tmp_path):
    told = run_ranks(steps(tmp_path / "s", 1, disk=lambda ranks: TakenOver(ranks.rank)), 2)
    assert all(said.startswith("FencedError: attempt 2 has taken ") for [said] in told), told


def test_beside_a_living_launcher_nobody_takes_over(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as launcher:
        try:
            before = dataclasses.replace(new_attempt(None, tmp_path), launcher=launcher.pid, pid=launcher.pid)
            ticks = Path(f"/proc/{launcher.pid}/stat").read_text().rpartition(")")[2].split()[19]
            living = dataclasses.replace(before, launcher_started=ticks)
            with pytest.raises(CheckpointLockedError, match=f"process {launcher.pid} on {socket.gethostname()}"):
                new_attempt(living, tmp_path)
            assert new_attempt(before, tmp_path).number == 2  # its number was given to another process since
        finally:
            launcher.kill()
    assert new_attempt(living, tmp_path).number == 2  # the launcher is dead: its ranks are orphans


NO_RECORDS = ["", "[]", "{}", {"number": "1"}, {"number": 0}, {"number": True}, {"pid": None}, {"pid": -1},
              {"pid": 10**30}, {"launcher": "../1"}, {"launcher": 1.0}, {"token": 7}, {"host": None},
              {"launcher_started": 5}, {"more": 1}]


@pytest.mark.parametrize("change", NO_RECORDS, ids=str)
def test_a_record_that_is_none_is_named(tmp_path, change):
    sound = new_attempt(None, tmp_path).to_plain()
    (tmp_path / ".attempt").write_text(json.dumps(sound))
    assert read_attempt(tmp_path).to_plain() == sound
    (tmp_path / ".attempt").write_text(change if isinstance(change, str) else json.dumps(sound | change))
    with pytest.raises(CheckpointError, match="expected an attempt's record"):
        read_attempt(tmp_path)


@pytest.mark.parametrize("how", ["directory", "FIFO"])
def test_a_record_that_is_no_file_is_named(tmp_path, how):
    (tmp_path / ".attempt").touch()
    anything_but_a_file(tmp_path / ".attempt", how)
    with pytest.raises(CheckpointError, match="expected an attempt's record"):
        read_attempt(tmp_path)


@pytest.mark.parametrize(("boundary", "rank", "told"), [("before_forward", 0, 1), ("during_write", 1, 2)])
def test_the_orphans_of_a_launcher_that_was_killed_cannot_publish(tmp_path, boundary, rank, told):
    "In the midst of a write the folder is gone, and who has taken the run over is told in place of that."
    config = TINY.replace(grad_accumulation=2, steps=4, checkpoint_every=2)
    result, said = outlive_launcher(config, tmp_path / "run", "fsdp", 2, boundary=boundary, rank=rank)
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    assert said.count("FencedError") == said.count("attempt 2 has taken") == told
    assert result["state_digest"] == digest_of_checkpoint(newest) == verify_generation(newest).state_digest
    assert read_generation(newest).attempt["number"] == 2


# Other people's files.

class Evil:
    "Would create a file when it is unpickled."

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickle_is_described_and_never_run(tmp_path, protocol):
    found = read_inert(pickle.dumps({"a": [1, (2.5, "x", b"y", None, True)], "b": Evil(tmp_path / "made")},
                                    protocol=protocol))
    assert found["a"] == [1, (2.5, "x", b"y", None, True)] or protocol == 2
    assert isinstance(found["b"], Inert) and found["b"].name.endswith("open")
    assert not (tmp_path / "made").exists()


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_description_or_an_error(data):
    with suppress(CheckpointError):
        read_inert(data)


def test_a_torch_save_file_that_would_run_code_is_refused(tmp_path):
    torch.save({"model": Evil(tmp_path / "made")}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="only running code could make"):
        import_checkpoint(tmp_path / "evil.pt", tmp_path / "out.safetensors")
    assert not (tmp_path / "made").exists() and not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64])
def test_what_torch_load_reads_is_read_without_it(tmp_path, dtype):
    base = torch.randint(0, 2, (4, 6)).to(dtype)
    module = torch.nn.Linear(3, 2)
    state = {"model": module.state_dict(), "t": base.t(), "part": base[1:3, ::2], "tied": [base, base], "none": None,
             "empty": torch.zeros(0, 2), "scalar": torch.tensor(3), "parameter": module.weight, "n": (1, 2.5, "x")}
    torch.save(state, tmp_path / "a.pt")
    found = read_torch_save(tmp_path / "a.pt")
    expected = torch.load(tmp_path / "a.pt", weights_only=True)
    assert type(found["model"]) is type(expected["model"]) and list(found["model"]) == list(expected["model"])
    for name in ("t", "part", "empty", "scalar", "parameter"):
        assert found[name].equal(expected[name].detach()) and found[name].dtype == expected[name].dtype
    assert found["model"]["weight"].equal(module.weight) and found["tied"][0] is found["tied"][1]
    assert found["n"] == (1, 2.5, "x") and found["none"] is None
