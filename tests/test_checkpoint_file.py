"""The checkpoint file: what goes in comes out to the bit, and what is damaged or forged is refused with its place."""

import contextlib
import errno
import gc
import json
import math
import os
import random
import socket
import struct
import sys
import threading
import time
import tracemalloc
from collections import Counter, OrderedDict
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fault_tolerant_transformer_lab.checkpoint_file as checkpoint_file
from fault_tolerant_transformer_lab.checkpoint_file import (
    DTYPES,
    CheckpointCorruptError,
    MalformedTree,
    TensorEntry,
    UnknownSchemaError,
    compare_tensors,
    decode_tree,
    diff,
    encode,
    encode_tree,
    open_checkpoint,
    read_manifest,
    state_digest,
    ulp_distance,
    verify,
)
from fault_tolerant_transformer_lab.contract import CheckpointError, ContractError, Segment, Snapshot

ENVIRONMENT = {"decides": {"threads": 1}, "recorded": {"host": "here"}}


def snapshot(tree, step=3, tokens_seen=96, **fields):
    """A snapshot of a state tree."""
    plain = {"description": {"seed": 1}, "identity": {"config": {"seed": 1}}, "environment": ENVIRONMENT,
             "lineage": (Segment(0, None, ENVIRONMENT, []),)}
    return Snapshot(step=step, tokens_seen=tokens_seen, tree=tree, **{**plain, **fields})


def write(path, what):
    """Write a snapshot, or a state tree, into a file; give its manifest."""
    encoding = encode(what if isinstance(what, Snapshot) else snapshot(what))
    with open(path, "wb") as file:
        for offset, view in encoding.chunks():
            file.seek(offset)
            file.write(view)
    assert os.path.getsize(path) == encoding.n_bytes
    return encoding.manifest


def seal(path, text, data=b""):
    """Write a header of our own making whose file digest is right, so that what follows the digest check is reached."""
    text = text if isinstance(text, bytes) else text.encode()
    n_bytes = -(-(8 + len(text)) // 4096) * 4096
    header = bytearray(struct.pack("<Q", n_bytes - 8) + text.ljust(n_bytes - 8))
    at = header.find(b"file_digest") + len(b'file_digest\\":\\"')
    if header[at:at + 64] == b"0" * 64:
        header[at:at + 64] = blake3(bytes(header)).hexdigest().encode()
    path.write_bytes(bytes(header) + data)
    return path


def header_of(path):
    """The header's JSON text, with its digest zeroed, and the data behind it."""
    raw = path.read_bytes()
    n_bytes = 8 + int.from_bytes(raw[:8], "little")
    text = raw[8:n_bytes].decode().rstrip()
    at = text.find("file_digest") + len('file_digest\\":\\"')
    return text[:at] + "0" * 64 + text[at + 64:], raw[n_bytes:]


def forge(path, change, more_data=b"", new_state_digest=True):
    """Apply `change(entries, document)` to a good file's header and make its digests right again."""
    text, data = header_of(path)
    entries = json.loads(text)
    document = json.loads(entries["__metadata__"]["fttl"])
    change(entries, document)
    if new_state_digest:
        with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
            document["state_digest"] = state_digest_of_header(entries, document)
    entries["__metadata__"]["fttl"] = json.dumps(document, separators=(",", ":"))
    return seal(path, json.dumps(entries, separators=(",", ":")), data + more_data)


def state_digest_of_header(entries, document):
    """The state digest that a header, however odd, should have."""
    leaves = {name: TensorEntry(name, DTYPES[entry["dtype"]], tuple(entry["shape"]), 0, 0, document["digests"][name])
              for name, entry in entries.items() if name != "__metadata__"}
    tree = decode_tree(document["tree"], leaves.__getitem__)
    return checkpoint_file._digest_of_state(document["step"], document["tokens_seen"], tree)


def same_bits(a, b):
    """Whether two trees are equal in every type, key and bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw_bytes(a) == raw_bytes(b)
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return struct.pack("<d", a) == struct.pack("<d", b) if isinstance(a, float) else a == b


def raw_bytes(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def loaded(tree):
    """A saved tree with its tensors in memory."""
    if isinstance(tree, dict):
        result = type(tree)()
        result.update({key: loaded(child) for key, child in tree.items()})
        return result
    if isinstance(tree, list | tuple):
        return type(tree)(map(loaded, tree))
    return tree.load() if hasattr(tree, "load_into") else tree


def example(dtype, shape, seed=0):
    """A tensor of random bits (of zeros and ones for bool)."""
    n_bytes = math.prod(shape) * dtype.itemsize
    if not n_bytes:
        return torch.empty(shape, dtype=dtype)
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, n_bytes, np.uint8)
    return torch.from_numpy(bits).view(dtype).reshape(shape)


@pytest.fixture
def good(tmp_path):
    """A small good checkpoint: two tensors, one of them tied, and plain values."""
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    tree = {"model": {"weight": weight, "tied": weight}, "rng": {"state": torch.arange(5, dtype=torch.uint8)},
            "plain": {"list": [1, 2.5, None, True], "pair": (1, "x")}}
    path = tmp_path / "good.safetensors"
    write(path, tree)
    return path


# ---- the format

@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 5), (4, 0, 2), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("name", DTYPES)
def test_safetensors_itself_reads_every_dtype(tmp_path, name, shape):
    tensor = example(DTYPES[name], shape)
    write(tmp_path / "a", {"t": tensor, "other": torch.ones(3)})
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert sorted(file.keys()) == ["other", "t"]
        assert file.metadata()["format"] == "pt"
        assert same_bits(file.get_tensor("t"), tensor)
    assert same_bits(load_file(tmp_path / "a")["t"], tensor)


def test_layout_is_aligned_and_leaves_no_hole(tmp_path):
    tree = {name: example(dtype, (5,)) for name, dtype in reversed(DTYPES.items())}
    manifest = write(tmp_path / "a", tree)
    assert manifest.data_start % 4096 == 0
    reached = 0
    for entry in sorted(manifest.tensors.values(), key=lambda entry: entry.begin):
        assert entry.begin == reached and entry.begin % entry.dtype.itemsize == 0
        reached = entry.end
    assert manifest.data_start + reached == manifest.n_bytes == os.path.getsize(tmp_path / "a")


def test_empty_tensors_of_any_shape_come_back(good):
    forge(good, lambda entries, document: entries["rng.state"].update(shape=[1 << 30, 0, 1 << 31], dtype="U8",
                                                                      data_offsets=[24, 24]))
    with pytest.raises(CheckpointCorruptError):
        read_manifest(good)  # five bytes are left over
    write(good, {"t": torch.empty(1 << 30, 0, 1 << 20)})
    with open_checkpoint(good) as saved:
        assert saved.tree["t"].load().shape == (1 << 30, 0, 1 << 20)


def test_an_empty_tensor_whose_strides_would_overflow_is_refused(tmp_path):
    write(tmp_path / "a", {"t": torch.empty(0)})
    forge(tmp_path / "a", lambda entries, document: entries["t"].update(shape=[0, 1 << 40, 1 << 40]))
    with pytest.raises(CheckpointCorruptError, match="larger than any memory"):
        read_manifest(tmp_path / "a")


def test_a_header_of_too_many_values_is_neither_read_nor_written(good, monkeypatch):
    n_values = sum(map(header_of(good)[0].count, ",:[{"))
    monkeypatch.setattr(checkpoint_file, "MAX_HEADER_VALUES", n_values)
    verify(good)
    monkeypatch.setattr(checkpoint_file, "MAX_HEADER_VALUES", n_values - 1)
    with pytest.raises(CheckpointCorruptError, match="values, at most"):
        read_manifest(good)
    with pytest.raises(ContractError, match="long plain values"):
        encode(snapshot({"many": list(range(n_values))}))


def test_header_comes_last_and_every_byte_once():
    tree = {"big": torch.zeros(5_000_000), "strided": torch.zeros(3000, 1000).t(), "small": torch.zeros(3)}
    encoding = encode(snapshot(tree))
    spans = [(offset, len(view)) for offset, view in encoding.chunks()]
    assert spans[-1] == (0, encoding.manifest.data_start)
    reached = encoding.manifest.data_start
    for offset, length in spans[:-1]:
        assert offset == reached and 0 < length <= 4 << 20
        reached += length
    assert reached == encoding.n_bytes


def test_manifest_is_known_only_after_the_last_chunk():
    encoding = encode(snapshot({"t": torch.ones(3)}))
    with pytest.raises(RuntimeError, match="exhaust"):
        encoding.manifest  # noqa: B018
    list(encoding.chunks())
    assert encoding.manifest.step == 3


def test_a_state_of_any_size_passes_through_four_page_aligned_buffers():
    tree = {"big": torch.zeros(10_000_000), "strided": torch.zeros(3000, 1000).t(), "small": torch.zeros(3)}
    data = [view for offset, view in encode(snapshot(tree)).chunks() if offset]
    addresses = [np.frombuffer(view, np.uint8).ctypes.data for view in data]
    assert len(set(addresses)) <= 4 < len(addresses) == -(-52_000_012 // (4 << 20))
    assert all(address % checkpoint_file.PAGE == 0 for address in addresses)


def test_a_relocated_encoding_gives_the_same_file_out_of_the_memory_that_it_was_given():
    tree = {"big": torch.randn(3_000_001), "half": torch.randn(7).half(), "empty": torch.zeros(0), "n": torch.tensor(3)}
    files = []
    for threads in (None, False, True):
        encoding = encode(snapshot(tree))
        if threads is not None:
            memory = torch.zeros(encoding.data_bytes, dtype=torch.uint8)
            for slot in encoding.slots:
                checkpoint_file.copy_bytes(encoding.tensors[slot.name], memory, slot.begin, threads=threads)
            encoding.relocate(memory.numpy().data)
            assert encoding.tensors == {}
        file = bytearray(encoding.n_bytes)
        for offset, view in encoding.chunks():
            file[offset:offset + len(view)] = view
        files.append(bytes(file))
    assert files[0] == files[1] == files[2]
    with pytest.raises(ValueError, match="expected memory of"):
        encode(snapshot(tree)).relocate(memoryview(bytearray(3)))


@pytest.mark.parametrize("dtype", ["uint8", "bool", "int16", "uint16", "bfloat16", "float16", "float32", "float64",
                                   "complex64", "complex128", "float8_e4m3fn", "float8_e8m0fnu"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "conjugate"])
def test_threads_copy_the_same_bits_as_one(dtype, layout):
    dtype = getattr(torch, dtype)
    if layout == "conjugate" and not dtype.is_complex:
        layout = "contiguous"
    n = (1 << 21) // dtype.itemsize
    every_pattern = torch.randint(0, 2 if dtype == torch.bool else 256, (n * dtype.itemsize,), dtype=torch.uint8)
    tensor = every_pattern.view(dtype).view(2, -1)  # signalling NaN, negative zero, denormals among them
    tensor = {"contiguous": tensor, "transposed": tensor.t(), "conjugate": tensor.conj()}[layout]
    one, many = (torch.zeros(tensor.nbytes, dtype=torch.uint8) for _ in range(2))
    checkpoint_file.copy_bytes(tensor, one, 0)
    checkpoint_file.copy_bytes(tensor, many, 0, threads=True)
    assert torch.equal(one, many)
    assert torch.equal(one, tensor.resolve_conj().contiguous().view(-1).view(torch.uint8))


class Watched:
    """A BLAKE3 hasher that calls `see` with the bytes before it digests them."""

    def __init__(self, *data, see=lambda data: None, **options):
        self.real, self.see = blake3(*data, **options), see

    def update(self, data):
        self.see(data)
        self.real.update(data)
        return self

    def hexdigest(self):
        return self.real.hexdigest()


@pytest.mark.parametrize("relocated", [False, True], ids=["out of tensors", "out of one memory"])
def test_bytes_are_digested_while_others_are_written(monkeypatch, relocated):
    """Whoever writes stays with the first chunk, and all others are digested meanwhile."""
    seen, through = [0], threading.Event()

    def see(data):
        if threading.current_thread() is not threading.main_thread():
            seen[0] += memoryview(data).nbytes
            if seen[0] == 12_000_000:
                through.set()

    encoding = encode(snapshot({"t": torch.ones(3_000_000)}))
    if relocated:
        memory = torch.ones(3_000_000)
        encoding.relocate(memory.view(torch.uint8).numpy().data)
    monkeypatch.setattr(checkpoint_file, "blake3", lambda *data, **options: Watched(*data, see=see, **options))
    chunks = encoding.chunks()
    assert len(next(chunks)[1]) < 12_000_000
    assert through.wait(30), f"{seen[0]:,} bytes were digested"
    chunks.close()


def test_verifying_uses_every_core(tmp_path, monkeypatch):
    write(tmp_path / "three", {name: torch.ones(1 << 20) for name in "abc"})  # 4 MiB each: a read of its own
    write(tmp_path / "one", {"a": torch.ones(1 << 20)})
    together, met, threads = threading.Barrier(3, timeout=30), set(), []

    def hasher(*data, max_threads=1, **options):
        def see(data):
            name = threading.current_thread().name
            if meeting and name.startswith("checkpoint-verify") and name not in met:
                met.add(name)
                together.wait()  # broken, and an error, where one thread does what is left

        threads.append(max_threads)
        return Watched(*data, see=see, max_threads=max_threads, **options)

    monkeypatch.setattr(checkpoint_file, "usable_cores", lambda: 3)
    monkeypatch.setattr(checkpoint_file, "blake3", hasher)
    meeting = True
    assert verify(tmp_path / "three").step == 3 and len(met) == 3
    meeting = False
    assert verify(tmp_path / "one").step == 3 and max(threads) == 3, "a single tensor is digested by all of them"


@pytest.mark.parametrize("n", [1000, 4000])
def test_the_number_of_reads_and_writes_does_not_grow_with_small_tensors(n, tmp_path):
    encoding = encode(snapshot({f"t.{i:05}": torch.full((16,), float(i)) for i in range(n)}))
    spans = [(offset, len(view)) for offset, view in encoding.chunks()]
    assert len(spans) == 2  # the data, the header
    assert encoding.n_bytes - encoding.data_bytes <= 4096 + 260 * n


def test_a_caller_that_gives_up_leaves_no_thread():
    before = threading.active_count()
    chunks = encode(snapshot({"t": torch.ones(9_000_000)})).chunks()
    next(chunks)
    assert threading.active_count() == before + 1
    chunks.close()
    assert threading.active_count() == before


def test_colliding_and_odd_names_stay_apart(tmp_path):
    tree = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2), "b#2": torch.tensor(3)}, "": torch.tensor(5),
            "__metadata__": torch.tensor(4), "\ud800": torch.tensor(6), "ключ": torch.tensor(7),
            "nl\n\"\\": torch.tensor(8)}
    write(tmp_path / "a", tree)
    assert len(load_file(tmp_path / "a")) == 8
    with open_checkpoint(tmp_path / "a") as saved:
        assert same_bits(loaded(saved.tree), tree)


def test_tied_tensors_are_stored_once_and_stay_one(tmp_path):
    weight = torch.randn(4, 4)
    manifest = write(tmp_path / "a", {"m": {"embedding": weight, "head": weight.detach(), "transposed": weight.t()}})
    assert set(manifest.tensors) == {"m.embedding", "m.transposed"}
    with open_checkpoint(tmp_path / "a") as saved:
        assert saved.tree["m"]["embedding"] is saved.tree["m"]["head"]


def without_memory(tensor, left=0):
    """Take the memory behind a tensor away, as wrappers that shard parameters do between uses."""
    tensor.untyped_storage().resize_(left)
    return tensor


@pytest.mark.parametrize("tensor", [
    torch.zeros(2, dtype=torch.complex128), torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"),
    torch.zeros([1] * 65), without_memory(torch.zeros(1 << 16)), without_memory(torch.zeros(8, 8).t(), 128)],
    ids=["complex128", "sparse", "meta", "65 dimensions", "freed", "shrunk"])
def test_what_the_format_cannot_hold_is_refused_with_its_path(tensor):
    with pytest.raises(ContractError, match=r"^model\.x\[1\] "):
        encode(snapshot({"model": {"x": [1, tensor]}}))


@pytest.mark.parametrize("leaf", [{1, 2}, object(), np.float32(1), 1j, torch.Size([1]), {1.5: 2}, {(1,): 2}, {True: 1}])
def test_what_is_no_plain_value_is_refused_with_its_path(leaf):
    with pytest.raises(ContractError, match=r"^sampler\.seen"):
        encode(snapshot({"sampler": {"seen": leaf}}))


# ---- the tree of plain values

scalars = st.none() | st.booleans() | st.integers() | st.floats(width=64) | st.text() | st.binary(max_size=40)
keys = st.text(max_size=8) | st.integers() | st.sampled_from(["$tensor", "$dict", "$", "__metadata__", "a.b"])


def containers(children):
    return (st.lists(children, max_size=4) | st.lists(children, max_size=4).map(tuple)
            | st.dictionaries(keys, children, max_size=4)
            | st.dictionaries(keys, children, max_size=4).map(OrderedDict)
            | st.dictionaries(keys, children, max_size=4).map(Counter))


trees = st.recursive(scalars, containers, max_leaves=25)


def no_tensor(*_):
    raise AssertionError("the tree holds no tensor")


@given(trees)
def test_tree_codec_round_trip(tree):
    text = json.dumps(encode_tree(tree, no_tensor), allow_nan=False)
    assert same_bits(decode_tree(json.loads(text), no_tensor), tree)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(
        st.sampled_from(["$tuple", "$dict", "$OrderedDict", "$Counter", "$int", "$float", "$bytes", "$tensor", "a"]),
        children, max_size=2), max_leaves=12)


@given(json_values)
def test_any_json_decodes_or_is_malformed(plain):
    try:
        decode_tree(plain, {"t": 1}.__getitem__)
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize("plain", [
    {"$int": "12"}, {"$int": 5}, {"$float": "7ff"}, {"$bytes": "é"}, {"$bytes": "a"}, {"$tuple": {}}, {"$x": 1},
    {"$dict": [[1]]}, {"$dict": [[1, 2], [1, 3]]}, {"$dict": [[True, 2]]}, {"$dict": [[None, 2]]}, {"$Counter": 3},
    {"$dict": [[1.0, 2]]}, {"$tuple": [], "a": 1}, {"$tensor": "unknown"}, {"$tensor": 1},
    {"$dict": [[{"$tensor": "t"}, 1]]}],
    ids=json.dumps)
def test_malformed_tags_are_refused(plain):
    with pytest.raises(ValueError):
        decode_tree(plain, {"t": torch.ones(1)}.__getitem__)


def test_nesting_has_a_limit_on_both_sides():
    deep, plain = 1, 1
    for _ in range(100):
        deep, plain = (deep,), [plain]
    assert decode_tree(encode_tree(deep, no_tensor), no_tensor) == deep
    with pytest.raises(ContractError, match="deeper than 100"):
        encode_tree([deep], no_tensor)
    with pytest.raises(MalformedTree, match="deeper than 100"):
        decode_tree([plain], no_tensor)


# ---- random states

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.builds(example, st.sampled_from(list(DTYPES.values())), shapes, st.integers(0, 2**32))
strided = (tensors | tensors.map(lambda t: t.transpose(0, -1) if t.dim() > 1 else t)
           | tensors.map(lambda t: t[..., ::2] if t.dim() else t))
states = st.dictionaries(st.text(max_size=5), st.recursive(scalars | strided, containers, max_leaves=12), max_size=4)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(states)
def test_random_states_round_trip_through_a_file(tmp_path, tree):
    manifest = write(tmp_path / "a", tree)
    assert verify(tmp_path / "a") == manifest
    assert state_digest(snapshot(tree)) == manifest.state_digest
    with open_checkpoint(tmp_path / "a") as saved:
        assert same_bits(loaded(saved.tree), tree)
        assert saved.step == 3 and saved.tokens_seen == 96 and saved.lineage == snapshot({}).lineage


def shuffled(tree, rng):
    """The same tree with the keys of every mapping in another order."""
    if isinstance(tree, dict):
        items = list(tree.items())
        rng.shuffle(items)
        result = type(tree)()
        result.update({key: shuffled(child, rng) for key, child in items})
        return result
    return type(tree)(shuffled(child, rng) for child in tree) if isinstance(tree, list | tuple) else tree


@settings(max_examples=60, deadline=None)
@given(states, st.randoms(use_true_random=False))
def test_state_digest_ignores_the_order_of_keys(tree, rng):
    assert state_digest(snapshot(shuffled(tree, rng))) == state_digest(snapshot(tree))


VALUES = [None, False, True, 0, 1, 0.0, -0.0, 1.0, math.nan, -math.nan, math.inf, 2**53 + 1, 2.0**53, "", "1", b"",
          b"1", [], (), {}, OrderedDict(), Counter(), [1], (1,), [[1]], {"a": 1}, {"a": None}, {"1": 1}, {1: 1}, [None],
          ["a", 1], struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0], torch.tensor(1), torch.tensor(1.0),
          torch.tensor([1]), torch.tensor([True]), torch.tensor([1], dtype=torch.uint8), torch.tensor(0.0),
          torch.tensor(-0.0), torch.empty(0), torch.empty(0, 1), torch.empty(1, 0)]


def test_state_digest_tells_all_values_apart():
    digests = {state_digest(snapshot({"x": value})) for value in VALUES}
    digests |= {state_digest(snapshot({"y": 1})), state_digest(snapshot({"x": 1}, step=4)),
                state_digest(snapshot({"x": 1}, tokens_seen=None))}
    assert len(digests) == len(VALUES) + 3


def test_state_digest_is_about_the_state_alone():
    one, other = snapshot({"x": 1}), snapshot({"x": 1}, description={"steps": 9}, environment={}, lineage=())
    assert state_digest(one) == state_digest(other)


def test_state_digest_is_this_one():
    tree = {"model": OrderedDict(w=torch.tensor([1.0, 2.0])), "plain": {1: "a", "b": (None, True, 2.5, b"x")}}
    assert state_digest(snapshot(tree)) == "a04fc645389b1f389495390c5765b28523b854045104bea1dad3373022e16401"


def test_every_piece_of_a_long_state_is_digested(monkeypatch):
    values = list(range(30_000))  # some hundred kilobytes of plain values: more than is digested at once
    whole = state_digest(snapshot({"x": values}))
    changed = {state_digest(snapshot({"x": [*values[:at], -1, *values[at + 1:]]})) for at in (0, 15_000, 29_999)}
    assert len({whole, *changed}) == 4
    monkeypatch.setattr(checkpoint_file, "_FOLD_BYTES", 1 << 40)
    assert state_digest(snapshot({"x": values})) == whole, "where a piece ends is no part of it"


def test_a_header_is_written_without_a_second_one_in_memory():
    encoding = checkpoint_file.Encoding(snapshot({f"layer.{i}.weight": torch.zeros(4) for i in range(10_000)}))
    tracemalloc.start()
    try:
        size = encoding.n_bytes - encoding.data_bytes
        assert size > 2_000_000 and tracemalloc.get_traced_memory()[1] < 2 * size
    finally:
        tracemalloc.stop()


def test_the_garbage_collector_rests_while_a_header_is_read_and_goes_on_whatever_happens(tmp_path, monkeypatch):
    path, seen = tmp_path / "file", []
    write(path, {"t": torch.ones(3)})
    real = checkpoint_file._parse_header
    monkeypatch.setattr(checkpoint_file, "_parse_header", lambda *given: seen.append(gc.isenabled()) or real(*given))
    read_manifest(path)
    assert seen == [False] and gc.isenabled()
    thread = threading.Thread(target=read_manifest, args=(path,))  # while which the main thread may fork
    thread.start()
    thread.join()
    assert seen == [False, True]
    monkeypatch.setattr(checkpoint_file, "_parse_header", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read_manifest(path)
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            read_manifest(path)
        assert not gc.isenabled(), "whoever switched it off wants it off"
    finally:
        gc.enable()


# ---- strides, devices and staging

@pytest.mark.parametrize("tensor", [
    torch.randn(2500, 1700).t(), torch.randn(3_000_000)[::2], torch.randn(7, 1).expand(7, 500_000),
    torch.randn(5, 6, 7).permute(2, 0, 1), torch.randn(2, 2_200_000).t(), torch.randn(3_000_000, 2).t(),
    torch.randn(20_000, dtype=torch.complex64).conj(), torch.randn(40_000, dtype=torch.complex64).conj().imag,
    torch._neg_view(torch.randn(40_000)),
    torch.nn.Parameter(torch.randn(5, 5)), torch.randn(4, 8, 3, 3).to(memory_format=torch.channels_last)],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()}")
def test_any_strides_are_written_in_row_major_order_and_read_back(tmp_path, tensor):
    write(tmp_path / "a", {"t": tensor})
    expected = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    assert torch.equal(load_file(tmp_path / "a")["t"], expected)
    live = torch.zeros_like(tensor, memory_format=torch.preserve_format).detach()
    with open_checkpoint(tmp_path / "a") as saved:
        saved.tree["t"].load_into(live)
    assert torch.equal(live.resolve_conj(), expected)


def test_a_default_device_does_not_move_the_buffers(tmp_path):
    live = torch.zeros(3, 5).t()
    with torch.device("meta"):
        write(tmp_path / "a", {"t": torch.arange(15.0, device="cpu").reshape(3, 5).t()})
        with open_checkpoint(tmp_path / "a") as saved:
            saved.tree["t"].load_into(live)
            assert torch.equal(saved.tree["t"].load(), live)
    assert live[4].tolist() == [4.0, 9.0, 14.0]


def test_staging_waits_for_a_slow_digest(tmp_path, monkeypatch):
    class Slow:
        def __init__(self, *data, **options):
            self.real = blake3(*data, **options)

        def update(self, data):
            time.sleep(0.002)
            self.real.update(data)

        def hexdigest(self):
            return self.real.hexdigest()

    monkeypatch.setattr(checkpoint_file, "_STAGING_BYTES", 4096)
    with monkeypatch.context() as slow:
        slow.setattr(checkpoint_file, "blake3", Slow)
        write(tmp_path / "a", {"t": torch.arange(40_000, dtype=torch.int32).reshape(200, 200).t()})
    assert verify(tmp_path / "a").tensors.keys() == {"t"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_tensors_pass_through_staging(tmp_path):
    tensors = {"big": torch.randn(3_000_001, device="cuda"), "strided": torch.randn(1500, 2100, device="cuda").t(),
               "half": torch.randn(77, device="cuda").bfloat16()}
    write(tmp_path / "a", tensors)
    with open_checkpoint(tmp_path / "a") as saved:
        for name, tensor in tensors.items():
            live = torch.zeros_like(tensor)
            saved.tree[name].load_into(live)
            assert torch.equal(live, tensor)


def test_reading_in_place_keeps_memory_and_tells_autograd(tmp_path):
    write(tmp_path / "a", {"t": torch.arange(4.0)})
    live = torch.nn.Parameter(torch.zeros(4))
    address, version = live.data_ptr(), live._version
    with open_checkpoint(tmp_path / "a") as saved:
        saved.tree["t"].load_into(live)
    assert live.tolist() == [0, 1, 2, 3] and live.data_ptr() == address and live._version > version


def test_reading_into_another_shape_or_dtype_is_refused(tmp_path):
    write(tmp_path / "a", {"t": torch.arange(4.0)})
    with open_checkpoint(tmp_path / "a") as saved:
        for out in (torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64)):
            with pytest.raises(ContractError, match="requested"):
                saved.tree["t"].load_into(out)
            assert not out.any()
    with pytest.raises(ValueError, match="inside the with block"):
        saved.tree["t"].load()


# ---- damage

def test_every_flipped_bit_is_found_and_placed(good):
    raw = good.read_bytes()
    manifest = read_manifest(good)
    spans = {name: (manifest.data_start + e.begin, manifest.data_start + e.end) for name, e in manifest.tensors.items()}
    rng = random.Random(1)
    header_bits = [*range(8 * 160), *(rng.randrange(8 * manifest.data_start) for _ in range(3000))]
    with open(good, "r+b", buffering=0) as file:
        for bit in [*header_bits, *range(8 * manifest.data_start, 8 * len(raw))]:
            byte, mask = bit // 8, 1 << bit % 8
            os.pwrite(file.fileno(), bytes([raw[byte] ^ mask]), byte)
            with pytest.raises(CheckpointCorruptError) as caught:
                verify(good)
            expected = next((name for name, (begin, end) in spans.items() if begin <= byte < end), "header")
            assert caught.value.where == expected and expected in str(caught.value), bit
            os.pwrite(file.fileno(), raw[byte:byte + 1], byte)
    verify(good)


def test_every_truncation_and_any_appendix_is_found(good):
    raw = good.read_bytes()
    for length in [*range(0, 300, 7), 4095, 4096, *range(4097, len(raw))]:
        good.write_bytes(raw[:length])
        with pytest.raises(CheckpointCorruptError):
            read_manifest(good)
    for extra in (b"\0", b" " * 4096):
        good.write_bytes(raw + extra)
        with pytest.raises(CheckpointCorruptError, match="describes") as caught:
            read_manifest(good)
        assert caught.value.where == "length"


def test_swapped_and_zeroed_blocks_are_found(tmp_path):
    path = tmp_path / "a"
    manifest = write(path, {"a": torch.randn(4096), "b": torch.randn(4096)})
    raw, start = path.read_bytes(), manifest.data_start
    one, other = raw[start:start + 4096], raw[start + 4096:start + 8192]
    for damaged in (raw[:start] + other + one + raw[start + 8192:], raw[:start] + bytes(4096) + raw[start + 4096:],
                    bytes(4096) + raw[4096:]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointCorruptError):
            verify(path)


def set_entry(name, **fields):
    return lambda entries, document: entries[name].update(fields)


def set_document(**fields):
    return lambda entries, document: document.update(fields)


def set_tree(change):
    return lambda entries, document: change(document["tree"])


HOSTILE = {
    "overlap": set_entry("rng.state", data_offsets=[20, 25]),
    "hole": set_entry("rng.state", data_offsets=[25, 30]),
    "out of range": set_entry("rng.state", data_offsets=[1 << 40, (1 << 40) + 5]),
    "negative": set_entry("rng.state", data_offsets=[-5, 0]),
    "fractional": set_entry("rng.state", data_offsets=[24.0, 29.0]),
    "huge offsets": set_entry("rng.state", data_offsets=[1 << 63, (1 << 63) + 5]),
    "reversed": set_entry("rng.state", data_offsets=[29, 24]),
    "three offsets": set_entry("rng.state", data_offsets=[24, 29, 29]),
    "boolean offset": set_entry("rng.state", data_offsets=[False, 5]),
    "shape product overflows": set_entry("rng.state", shape=[1 << 32, 1 << 32, 5]),
    "shape overflows to the size": set_entry("rng.state", shape=[5, (1 << 64) + 1]),
    "shape of zero and huge": set_entry("rng.state", shape=[0, 1 << 62, 1 << 62], data_offsets=[24, 24]),
    "negative shape": set_entry("rng.state", shape=[-1, -5]),
    "fractional shape": set_entry("rng.state", shape=[5.0]),
    "boolean shape": set_entry("rng.state", shape=[True, 5]),
    "too many dimensions": set_entry("rng.state", shape=[1] * 70 + [5]),
    "shape is text": set_entry("rng.state", shape="5"),
    "unknown dtype": set_entry("rng.state", dtype="F4"),
    "fewer elements than bytes": set_entry("rng.state", shape=[3]),
    "dtype of wrong size": set_entry("rng.state", dtype="F32"),
    "dtype is a list": set_entry("rng.state", dtype=["U8"]),
    "extra field": set_entry("rng.state", more=1),
    "entry is a list": lambda entries, document: entries.update({"rng.state": []}),
    "unlisted tensor": lambda entries, _: entries.update(extra=dict(entries["rng.state"], data_offsets=[29, 34])),
    "lost tensor": lambda entries, document: entries.pop("rng.state"),
    "lost digest": lambda entries, document: document["digests"].pop("rng.state"),
    "digest in capitals": lambda entries, document: document["digests"].update({"rng.state": "A" * 64}),
    "digest too short": lambda entries, document: document["digests"].update({"rng.state": "a" * 63}),
    "digest is a number": lambda entries, document: document["digests"].update({"rng.state": 7}),
    "reference to nothing": set_tree(lambda tree: tree.update(more={"$tensor": "no such tensor"})),
    "tensor without reference": set_tree(lambda tree: tree.pop("rng")),
    "a number that is never written": set_tree(lambda tree: tree.update(more=10**25)),
    "unknown tag": set_tree(lambda tree: tree.update(more={"$set": [1]})),
    "tree is a list": set_document(tree=[]),
    "step is a fraction": set_document(step=3.0),
    "step is negative": set_document(step=-1),
    "step is true": set_document(step=True),
    "tokens is text": set_document(tokens_seen="96"),
    "config is a list": set_document(config=[]),
    "config holds a tensor": set_document(config={"x": {"$tensor": "rng.state"}}),
    "config is a tuple": set_document(config={"$tuple": []}),
    "lineage is odd": set_document(lineage=[{"start": 1}]),
    "lineage is text": set_document(lineage=["x"]),
    "no schema version": lambda entries, document: document.pop("schema_version"),
    "schema version is text": set_document(schema_version="1"),
    "schema version is true": set_document(schema_version=True),
    "extra document field": set_document(more=1),
    "lost document field": lambda entries, document: document.pop("environment"),
    "another metadata": lambda entries, document: entries["__metadata__"].update(format="tf"),
    "metadata has more": lambda entries, document: entries["__metadata__"].update(more="x"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_forged_header_is_refused(good, name):
    text, data = header_of(good)
    seal(good, text, data)
    verify(good)  # the way of forging is right: without a change the file is good
    forge(good, HOSTILE[name])
    with pytest.raises(CheckpointCorruptError) as caught:
        read_manifest(good)
    assert good.name in str(caught.value) and caught.value.where in str(caught.value)
    assert "state digest" not in str(caught.value) and "bytes have the digest" not in str(caught.value)


def test_a_hole_that_the_file_has_room_for_is_refused(good):
    forge(good, set_entry("rng.state", data_offsets=[25, 30]), more_data=b"\0")
    with pytest.raises(CheckpointCorruptError, match="leaves a hole") as caught:
        read_manifest(good)
    assert caught.value.where == "rng.state"


def test_a_tensor_that_nothing_refers_to_is_refused(good):
    def smuggle(entries, document):
        entries["more"] = {"dtype": "U8", "shape": [4], "data_offsets": [29, 33]}
        document["digests"]["more"] = blake3(b"data").hexdigest()

    forge(good, smuggle, more_data=b"data")
    with pytest.raises(CheckpointCorruptError, match="refers") as caught:
        read_manifest(good)
    assert caught.value.where == "more"


@pytest.mark.parametrize("change", [set_document(step=4), set_document(tokens_seen=None),
                                    set_tree(lambda tree: tree["plain"].update(pair=3)),
                                    set_tree(lambda tree: tree["plain"].update(list=[1, 2.5, None, 1])),
                                    set_entry("model.weight", shape=[3, 2])],
                         ids=["step", "tokens", "value", "one for true", "shape"])
def test_a_state_other_than_its_digest_is_refused(good, change):
    forge(good, change, new_state_digest=False)
    with pytest.raises(CheckpointCorruptError, match="state digest"):
        read_manifest(good)
    forge(good, change)
    assert verify(good).state_digest  # with the digest made right it is simply another state


FRONT = '{"__metadata__":{"fttl":"{\\"file_digest\\":\\"' + "0" * 64 + '\\"'
BROKEN = {
    "nested deeply": FRONT + ',\\"a\\":' + "[" * 200_000,
    "nested deeply outside": FRONT + '}"},"a":' + "[" * 200_000 + "]" * 200_000 + "}",
    "endless digits": FRONT + '}"},"a":' + "9" * 100_000 + "}",
    "NaN": FRONT + '}"},"a":NaN}',
    "infinity": FRONT + '}"},"a":1e999}',
    "duplicate key": FRONT + '}"},"a":1,"a":1}',
    "duplicate key inside": FRONT + ',\\"a\\":1,\\"a\\":2}"}}',
    "duplicate document": FRONT + '}","fttl":"{}"}}',
    "cut off": FRONT,
    "two documents": FRONT + '}"}} {}',
    "not UTF-8": FRONT.encode() + b'}"},"\xff":1}',
    "a lone list": FRONT + '}"},"a":[1]}',
    "document is a list": '{"__metadata__":{"fttl":"{\\"file_digest\\":\\"' + "0" * 64 + '\\"}","x":1}}',
    "document is no text": FRONT + '}","fttl":5}}',
    "UTF-16": FRONT.encode() + "}".encode("utf-16"),
    "zero bytes behind": FRONT.encode() + b'}","format":"pt"}}' + bytes(50),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_header_with_a_right_digest_is_refused(tmp_path, name):
    with pytest.raises(CheckpointCorruptError) as caught:
        read_manifest(seal(tmp_path / "a", BROKEN[name]))
    assert caught.value.where == "header" and "digest 0" not in str(caught.value)


def test_a_duplicate_tensor_is_refused_though_safetensors_takes_it(good):
    text, data = header_of(good)
    entry = text[text.index('"rng.state":{'):-1]
    seal(good, f"{text[:-1]},{entry}}}", data)
    load_file(good)
    with pytest.raises(CheckpointCorruptError, match="twice"):
        read_manifest(good)


@pytest.mark.parametrize("length", [0, 1, 100, 4096, 1 << 31, 1 << 62, (1 << 64) - 1, (1 << 64) - 8])
def test_absurd_header_lengths_are_refused(good, length):
    good.write_bytes(struct.pack("<Q", length) + good.read_bytes()[8:])
    with pytest.raises(CheckpointCorruptError) as caught:
        read_manifest(good)
    assert caught.value.where == "header"


def test_a_header_longer_than_any_in_a_file_that_has_room_for_it_is_told_the_limit(good):
    with open(good, "r+b") as file:
        file.write(struct.pack("<Q", checkpoint_file.MAX_HEADER_BYTES))
        file.truncate(2 * checkpoint_file.MAX_HEADER_BYTES)  # sparse
    with pytest.raises(CheckpointCorruptError, match="its length says 100000008 bytes, the most is 100000000"):
        read_manifest(good)


def test_a_header_off_its_boundary_is_refused(good):
    text, data = header_of(good)
    raw = bytearray(struct.pack("<Q", len(text) + 1) + text.encode() + b" ")
    at = raw.find(b"file_digest") + len(b'file_digest\\":\\"')
    raw[at:at + 64] = blake3(bytes(raw)).hexdigest().encode()
    good.write_bytes(bytes(raw) + data)
    load_file(good)
    with pytest.raises(CheckpointCorruptError, match="4096"):
        read_manifest(good)


def test_a_later_schema_is_named_and_not_guessed(good):
    forge(good, lambda entries, document: (document.update(schema_version=2, more=[1]), entries.update(odd=1)))
    for read in (read_manifest, verify):
        with pytest.raises(UnknownSchemaError, match="schema version 2, this release reads 1"):
            read(good)


def test_a_plain_safetensors_file_is_called_one(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "a", metadata={"format": "pt"})
    with pytest.raises(CheckpointCorruptError, match="a plain safetensors file of 2 tensors"):
        read_manifest(tmp_path / "a")


def test_only_regular_files_are_opened(tmp_path, good):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(good)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
        kinds = {"fifo": "a FIFO", "directory": "a directory", "link": "a symbolic link", "socket": "a socket",
                 "dangling": "a symbolic link"}
        for name, found in kinds.items():
            for read in (read_manifest, verify):
                with pytest.raises(CheckpointCorruptError, match=found):
                    read(tmp_path / name)
    with pytest.raises(CheckpointCorruptError, match="a device"):
        read_manifest("/dev/zero")
    with pytest.raises(FileNotFoundError):
        read_manifest(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["fifo", "link", "directory"])
def test_a_name_that_changes_hands_at_the_last_moment_is_refused(tmp_path, good, monkeypatch, name):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(good)
    (tmp_path / "directory").mkdir()
    regular = os.lstat(good)
    monkeypatch.setattr(checkpoint_file.os, "lstat", lambda path: regular)
    with pytest.raises(CheckpointCorruptError, match="expected a regular file"):
        read_manifest(tmp_path / name)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_mutated_bytes_never_pass(good, data):
    raw = good.with_name("raw")
    if not raw.exists():
        raw.write_bytes(good.read_bytes())
    original = raw.read_bytes()
    mutated = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1) | st.integers(0, 200) | st.integers(4096, len(original) - 1))
        at = min(at, len(mutated) - 1)
        kind = data.draw(st.sampled_from(["set", "insert", "delete"]))
        if kind == "set":
            mutated[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            mutated[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            del mutated[at:at + data.draw(st.integers(1, 9))]
    good.write_bytes(mutated)
    if mutated != original:
        with pytest.raises(CheckpointCorruptError):
            verify(good)


TOKENS = ['"', "{", "}", "[", "]", ",", ":", "\\", "\\\"", "0", "-1", "1e9", "1.5", "null", "true", "$tensor", "$dict",
          "__metadata__",
          "18446744073709551616", "F32", "[]", "{}", "\\u0000", "é", "rng.state", "data_offsets"]


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_mutated_header_with_a_right_digest_is_read_or_refused(good, data):
    raw = good.with_name("raw")
    if not raw.exists():
        raw.write_bytes(good.read_bytes())
    text, tensors = header_of(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(110, len(text)))
        until = at + data.draw(st.integers(0, 12))
        text = text[:at] + data.draw(st.sampled_from(TOKENS) | st.text(max_size=3)) + text[until:]
    seal(good, text.encode("utf-8", "surrogatepass"), tensors)
    try:
        manifest = verify(good)
    except CheckpointError as error:
        assert isinstance(error, CheckpointCorruptError | UnknownSchemaError)
    else:
        assert manifest.tensors.keys() == {"model.weight", "rng.state"}


def test_a_file_cut_or_changed_while_open_is_noticed(good):
    with open_checkpoint(good) as saved:
        os.truncate(good, os.path.getsize(good) - 1)
        with pytest.raises(CheckpointError, match="changed"):
            saved.tree["rng"]["state"].load()


def test_a_short_read_and_an_io_error_are_errors(good, monkeypatch):
    real = os.preadv

    def one_byte(fd, buffers, offset):
        return real(fd, [buffers[0][:1]], offset)

    monkeypatch.setattr(checkpoint_file.os, "preadv", one_byte)
    verify(good)  # a short read is continued

    def fail(fd, buffers, offset):
        if offset >= 4096:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(checkpoint_file.os, "preadv", fail)
    with pytest.raises(CheckpointCorruptError, match="Input/output error") as caught:
        verify(good)
    assert caught.value.where in read_manifest(good).tensors
    monkeypatch.setattr(checkpoint_file.os, "preadv", lambda fd, buffers, offset: 0)
    with pytest.raises(CheckpointCorruptError, match="ends at byte 0"):
        verify(good)


def test_descriptors_are_closed_on_every_way_out(good):
    def n_open():
        return len(os.listdir("/proc/self/fd"))

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    before = n_open()
    verify(good)
    forge(good, HOSTILE["hole"])
    for path in (good, good.parent):
        with pytest.raises(CheckpointCorruptError):
            verify(path)
    assert n_open() == before


# ---- memory

MEASURE = """
import gc, os, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from fault_tolerant_transformer_lab.checkpoint_file import *
from fault_tolerant_transformer_lab.contract import Snapshot
def status(field):
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(field)).split()[1]) * 1024
def extra(call):
    gc.collect(); Path("/proc/self/clear_refs").write_text("5"); before = status("VmRSS")
    call()
    return status("VmHWM") - before
def snap(tree): return Snapshot(1, 2, tree, {}, {}, {}, ())
path = Path(sys.argv[1])
def write(tree):
    encoding = encode(snap(tree))
    with open(path, "wb", buffering=0) as file:
        for offset, view in encoding.chunks(): os.pwrite(file.fileno(), view, offset)
"""


def measured(code, *arguments):
    """Run code in a process of its own; give the numbers that it prints."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs /proc/self/clear_refs to reset the peak")
    done = forked.run([sys.executable, "-c", MEASURE + code, *arguments])
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def test_saving_verifying_and_reading_in_place_need_little_memory(tmp_path):
    saved, checked, restored = measured("""
tree = {"a": torch.ones(30_000_000), "t": torch.ones(4000, 7500).t()}
write({"warm": torch.ones(300, 300).t()}); verify(path)
print(extra(lambda: write(tree)))
print(extra(lambda: verify(path)))
def restore():
    with open_checkpoint(path) as state:
        for name in tree: state.tree[name].load_into(tree[name])
print(extra(restore))
""", tmp_path / "a")
    assert max(saved, checked, restored) < 40 << 20, (saved, checked, restored)  # of 240 MB


def test_a_store_saves_and_restores_in_little_memory(tmp_path):
    saved, restored = measured("""
from fault_tolerant_transformer_lab.contract import Contract
from fault_tolerant_transformer_lab.publication import CheckpointStore
path.parent.chmod(0o700)
model = torch.nn.Linear(4000, 5000, bias=False)
optimizer = torch.optim.AdamW(model.parameters())
model.weight.grad = torch.ones_like(model.weight)
optimizer.step()
optimizer.zero_grad(set_to_none=True)
contract = Contract(model=model, optimizer=optimizer)
with CheckpointStore(path, keep_last=1) as store:
    store.save(contract, step=1)
    print(extra(lambda: store.save(contract, step=2)))
    print(extra(lambda: store.restore(contract)))
""", tmp_path / "checkpoints")
    assert max(saved, restored) < 64 << 20, (saved, restored)  # of 240 MB


@pytest.mark.parametrize("filler", ["[],", "{},", '"ab",', "1.5,", '{\\"a\\":1},'])
def test_a_hostile_header_cannot_exhaust_memory(tmp_path, filler):
    size = 24_000_000
    body = (filler * (size // len(filler)))[:-1]
    where = ',\\"a\\":[' + body.replace('"', '\\"').replace("\\\\", "\\") + ']}"}}'
    path = seal(tmp_path / "a", FRONT + where)
    used, = measured("""
def refused():
    try: read_manifest(path)
    except CheckpointCorruptError as error: return
    raise SystemExit("accepted")
print(extra(refused))
""", path)
    assert used < 4 * size + (400 << 20)


# ---- comparing

def kinds(differences):
    return {difference.path: difference.kind for difference in differences}


def test_diff_of_equal_states_is_empty(tmp_path):
    tree = {"a": torch.randn(3), "b": {"x": math.nan}}
    write(tmp_path / "a", snapshot(tree))
    write(tmp_path / "b", snapshot({"b": tree["b"], "a": tree["a"].clone()}, description={"steps": 5}, lineage=()))
    assert diff(tmp_path / "a", tmp_path / "b") == []


def test_diff_names_each_place_and_measures_it(tmp_path):
    a = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0]), "n": torch.tensor([1, 2]), "same": torch.ones(2), "x": [1, 0.0, "s"],
         "gone": torch.ones(2, 3), "d": torch.ones(2), "s": torch.ones(2), "e": {}, "k": (1,),
         "c": torch.tensor([1 + 1j])}
    b = {"w": torch.tensor([1.0, 2.0000005, 3.0, 4.0]), "n": torch.tensor([1, -2]), "same": torch.ones(2),
         "x": [1.0, -0.0, "t"], "d": torch.ones(2, dtype=torch.float64), "s": torch.ones(1, 2), "e": [], "k": (1, 2),
         "c": torch.tensor([1 + 1.5j]), "more": None}
    write(tmp_path / "a", snapshot(a))
    write(tmp_path / "b", snapshot(b, step=4))
    found = {difference.path: difference for difference in diff(tmp_path / "a", tmp_path / "b")}
    assert kinds(found.values()) == {
        "step": "value", "w": "value", "n": "value", "x[0]": "type", "x[1]": "value", "x[2]": "value",
        "gone": "only in a", "d": "dtype", "s": "shape", "e": "type", "k[1]": "only in b", "c": "value",
        "more": "only in b"}
    assert (found["step"].a, found["step"].b) == (3, 4)
    w = found["w"]
    assert w.max_ulp == 2 and w.share == 0.25 and w.max_abs == pytest.approx(4.76837158203125e-07, abs=0)
    assert (found["n"].max_abs, found["n"].max_ulp, found["n"].share) == (4, None, 0.5)
    assert found["gone"].a == "float32 [2, 3]" and (found["d"].a, found["d"].b) == ("float32", "float64")
    assert (found["s"].a, found["s"].b) == ("(2,)", "(1, 2)") and found["c"].max_abs == 0.5
    assert "25.000% of elements differ" in str(w) and "2 ULP" in str(w) and "1 against 1.0" in str(found["x[0]"])


def test_diff_follows_tied_and_renamed_tensors(tmp_path):
    weight = torch.ones(3)
    write(tmp_path / "a", {"x": weight, "y": weight})
    write(tmp_path / "b", {"x": weight, "y": weight.clone()})
    assert diff(tmp_path / "a", tmp_path / "b") == []
    write(tmp_path / "b", {"y": torch.zeros(3), "x": weight})
    assert kinds(diff(tmp_path / "a", tmp_path / "b")) == {"y": "value"}


def test_diff_looks_at_every_block_of_a_large_tensor(tmp_path):
    a = torch.zeros(2_000_000)
    b = a.clone()
    b[[5, 1_999_999]] = torch.tensor([1.0, -3.0])
    write(tmp_path / "a", {"t": a})
    write(tmp_path / "b", {"t": b})
    only, = diff(tmp_path / "a", tmp_path / "b")
    assert only.max_abs == 3.0 and only.share == 1e-6


def test_diff_of_a_damaged_tensor_is_an_error(tmp_path):
    write(tmp_path / "a", {"t": torch.ones(3)})
    write(tmp_path / "b", {"t": torch.zeros(3)})
    raw = bytearray((tmp_path / "b").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "b").write_bytes(raw)
    with pytest.raises(CheckpointCorruptError, match="do not match") as caught:
        diff(tmp_path / "a", tmp_path / "b")
    assert caught.value.where == "t"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_ulp_counts_the_steps_between_neighbours(dtype):
    one = torch.tensor([1.0, -1.0, 0.0, 0.0, 2.0], dtype=dtype)
    up, down = torch.full_like(one, math.inf), torch.full_like(one, -math.inf)
    three = one
    for _ in range(3):
        three = torch.nextafter(three, up)
    assert ulp_distance(one, three).tolist() == [3] * 5
    assert ulp_distance(torch.nextafter(one, down), torch.nextafter(one, up))[2] == 2  # across zero
    assert ulp_distance(torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype)).tolist() == [0]


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "BOOL"])
def test_compare_tensors_agrees_with_counting_by_hand(name):
    dtype = DTYPES[name]
    a = torch.arange(8).to(torch.float32).to(dtype) if dtype.is_floating_point else torch.arange(8).to(dtype)
    b = a.clone()
    size = dtype.itemsize
    b.view(torch.uint8)[3 * size:4 * size] = a.view(torch.uint8)[5 * size:6 * size]
    n_changed, apart, _ = compare_tensors(a, b)
    assert (n_changed, apart) == (1, 2)


def test_compare_tensors_at_the_edges():
    inf, nan = math.inf, math.nan
    assert compare_tensors(torch.tensor([inf, 1.0]), torch.tensor([inf, 2.0]))[:2] == (1, 1.0)
    assert math.isnan(compare_tensors(torch.tensor([nan, 1.0]), torch.tensor([1.0, 1.0]))[1])
    assert compare_tensors(torch.tensor([nan]), torch.tensor([nan])) == (0, 0, 0)
    assert compare_tensors(torch.tensor([-2**63]), torch.tensor([2**63 - 1])) == (1, 2**64 - 1, None)
    assert compare_tensors(torch.tensor([True, False]), torch.tensor([True, True])) == (1, 1, None)
    assert compare_tensors(torch.tensor([0], dtype=torch.uint64), torch.tensor([2**64 - 1], dtype=torch.uint64)) == (
        1, 2**64 - 1, None)


@pytest.mark.parametrize(("code", "damage"), [(errno.EIO, True), (errno.ENOMEM, False), (errno.EINVAL, False)])
def test_an_error_of_the_moment_condemns_no_file(good, monkeypatch, code, damage):
    path = good
    real = os.preadv

    def failing(fd, buffers, offset):
        if offset >= 4096:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CheckpointError) as caught:
        verify(path)
    assert isinstance(caught.value, CheckpointCorruptError) is damage
    monkeypatch.undo()
    verify(path)


@pytest.mark.parametrize(("name", "value"), [
    ("lineage", [{"start_step": None, "parent_digest": None, "environment": {}, "accepted_changes": []}]),
    ("lineage", [{"start_step": 0, "parent_digest": None, "environment": {}, "accepted_changes": [1]}]),
    ("lineage", [{"start_step": 0, "parent_digest": 7, "environment": {}, "accepted_changes": []}]),
    ("lineage", [{"start_step": 0, "parent_digest": None, "environment": {"decides": [1]}, "accepted_changes": []}]),
    ("environment", {"decides": [1], "recorded": {}}),
], ids=str)
def test_what_stands_beside_the_tree_has_its_types(good, name, value):
    def change(entries, document):
        document[name] = value

    forge(good, change)
    with pytest.raises(CheckpointCorruptError, match="malformed") as caught:
        read_manifest(good)
    assert caught.value.where == "header"
