"""Files of `torch.save` and folders of `torch.distributed.checkpoint`: read as torch does, or refused."""

import collections
import io
import pickle
import struct
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from fault_tolerant_transformer_lab.checkpoint_file import open_checkpoint
from fault_tolerant_transformer_lab.contract import CheckpointError
from fault_tolerant_transformer_lab.sharded import import_checkpoint, read_dcp_folder, read_inert, read_torch_save

COMPLEX = torch.tensor([1 + 2j, 3 - 1j])
BASE = torch.arange(12.0).reshape(3, 4)
ACCEPTED = {
    "dtype": torch.bfloat16, "size": torch.Size([2, 3]), "set": {1, 2}, "complex": 1 + 2j, "bytes": b"\xff\0a",
    "bytearray": bytearray(b"ab"), "device": torch.device("cpu"), "counter": collections.Counter("aab"),
    "ordered": collections.OrderedDict(b=1, a=2), "long": 1 << 70, "negative": -5, "infinite": float("-inf"),
    "keys": {torch.float16: 1, (1, "a"): 2}, "float8": torch.ones(3).to(torch.float8_e5m2),
    "expanded": BASE[:1, :1].expand(5, 7), "unsigned": torch.tensor([1, 65535], dtype=torch.uint16),
    "conjugate": COMPLEX.conj(), "negated": COMPLEX.conj().imag,
    "both": (-COMPLEX.conj()).conj(), "double": COMPLEX.to(torch.complex128), "buffer": torch.nn.Buffer(BASE),
    "parameter": torch.nn.Parameter(BASE), "view": BASE.t()[1:, ::2], "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(7),
    "module": torch.nn.BatchNorm1d(3).state_dict(), "bool": torch.tensor([True, False]),
    "optimizer": torch.optim.AdamW([torch.nn.Parameter(BASE)], lr=torch.tensor(0.1)).state_dict(),
}


def same(a, b):
    "Whether two values are equal in every bit and type; a parameter counts as its tensor."
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape) and bytes(
            a.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).tolist()) == bytes(
            b.contiguous().flatten().view(torch.uint8).tolist())
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_weights_only_accepts_is_read_alike(tmp_path, name):
    torch.save({"value": ACCEPTED[name], "again": [ACCEPTED[name]]}, tmp_path / "a.pt")
    expected, found = torch.load(tmp_path / "a.pt", weights_only=True), read_torch_save(tmp_path / "a.pt")
    assert same(expected["value"], found["value"]) and same(expected["again"], found["again"])
    if isinstance(ACCEPTED[name], torch.Tensor):
        assert found["value"] is found["again"][0]


def test_views_of_one_storage_share_memory_as_torch_has_them(tmp_path):
    torch.save({"all": BASE, "row": BASE[1]}, tmp_path / "a.pt")
    found = read_torch_save(tmp_path / "a.pt")
    found["all"][1, 2] = 99
    assert found["row"].tolist() == [4, 5, 99, 7]


@pytest.mark.parametrize(("value", "word"), [
    (torch.eye(2).to_sparse(), "to_dense"), (torch.empty(2, device="meta"), "dense tensors"),
    (torch.ones(2).untyped_storage(), "persistent")])
def test_what_no_checkpoint_can_hold_is_refused_by_name(tmp_path, value, word):
    torch.save({"model": {"w": BASE}, "other": value}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=word):
        read_torch_save(tmp_path / "a.pt")


def test_what_is_not_taken_need_not_be_representable(tmp_path):
    torch.save({"model": {"w": BASE}, "arguments": {"dtype": torch.float16, "names": {"a", "b"}}}, tmp_path / "a.pt")
    made = import_checkpoint(tmp_path / "a.pt", tmp_path / "a.safetensors", key="model")
    with open_checkpoint(made.path) as opened:
        assert opened.tree["model"]["w"].load().equal(BASE)
    with pytest.raises(CheckpointError, match=r"model\.arguments\.(dtype|names)"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "b.safetensors")


class Call:
    "Calls something when it is unpickled."

    def __init__(self, function, *arguments):
        self.made = function, arguments

    def __reduce__(self):
        return self.made


@pytest.mark.parametrize("evil", [Call(eval, "1"), Call(getattr, "a", "upper"), Call(torch.load, "x"),
                                  Call(torch.Size)])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_code_is_refused_as_weights_only_refuses_it(tmp_path, evil, protocol):
    torch.save({"a": evil}, tmp_path / "a.pt", pickle_protocol=protocol)
    try:
        torch.load(tmp_path / "a.pt", weights_only=True)
    except pickle.UnpicklingError:
        with pytest.raises(CheckpointError):
            value = read_torch_save(tmp_path / "a.pt")
            assert evil.made[0] is torch.Size and value == {"a": torch.Size([])}, value
            raise CheckpointError("plain, and of a protocol that torch.load does not take") from None
    else:
        assert read_torch_save(tmp_path / "a.pt") == {"a": torch.Size([])}


# A file that means harm, made by hand: any pickle in an archive as torch.save writes it.


def archive(path, pickled, members=None, compressed=False):
    "Write an archive."
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as out:
        out.writestr("x/data.pkl", pickled)
        out.writestr("x/version", b"3")
        for name, content in ({"data/0": bytes(16)} if members is None else
                              members).items():
            out.writestr(f"x/{name}", content)
    return path


def text(value):
    "The opcode of a text."
    return b"X" + struct.pack("<I", len(value)) + value.encode()


NAME = text("0")


def tensor(size=b"K\x02\x85", stride=b"K\x01\x85", offset=b"K\x00", kind="FloatStorage", key=NAME, more=b""):
    "The opcodes of a tensor; each part may be replaced."
    storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + key + text("cpu") + b"K\x04tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + size + stride + b"\x89N" + more + b"tR"


def test_the_archive_made_by_hand_is_one(tmp_path):
    path = archive(tmp_path / "a.pt", b"\x80\x02" + tensor() + b".")
    assert read_torch_save(path).tolist() == [0, 0] == torch.load(path, weights_only=True).tolist()


def doubling(levels):
    "Opcodes of a list of two lists of two lists ..., each the same one twice: short, and endless when written out."
    inner = b"]q\x00"
    for level in range(levels):
        inner += b"]q" + bytes([level + 1]) + b"(h" + bytes([level]) + b"h" + bytes([level]) + b"e"
    return inner


LONG = b"\x8a\x07" + (1 << 50).to_bytes(7, "little")
HOSTILE = {
    "nothing": b"", "an end without a value": b".", "no such mark": b"t.",
    "a container within itself": b"]q\x00h\x00a.",
    "doubling": doubling(80) + b".", "deep": b"]" * 5000 + b"a" * 4999 + b".", "unhashable": b"}]K\x01s.",
    "a call of nothing": b"ctorch._utils\n_rebuild_tensor_v2\n)R.", "text is called": text("a") + b")R.",
    "an unknown attribute": b"ctorch\nload\n.",
    "another encoding": b"c_codecs\nencode\n" + text("a") + text("idna") + b"\x86R.",
    "outside its storage": tensor(size=b"K\x07\x85") + b".",
    "a negative offset": tensor(offset=b"J\xff\xff\xff\xff") + b".",
    "a negative size": tensor(size=b"J\xff\xff\xff\xff\x85") + b".",
    "a size of text": tensor(size=text("a") + b"\x85") + b".",
    "an endless view": tensor(size=LONG + b"\x85", stride=b"K\x00\x85") + b".",
    "an overflowing view": tensor(size=LONG + LONG + b"\x86", stride=b"K\x00K\x00\x86") + b".",
    "no such storage": tensor(key=text("../0")) + b".", "a storage of nothing": tensor(key=b"N") + b".",
    "an unknown dtype": tensor(kind="SecretStorage") + b".",
    "an unknown mark": tensor(more=b"}" + text("lazy") + b"\x88s") + b".",
    "a huge set": b"cbuiltins\nbytearray\n" + LONG + b"\x85R.", "a huge memo": b"Nr\xff\xff\xff\xff.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_description_that_means_harm_is_refused_in_one_line(tmp_path, name):
    path = archive(tmp_path / "a.pt", b"\x80\x02" + HOSTILE[name] if HOSTILE[name] else b"")
    if name == "a huge memo":
        assert read_torch_save(path) is None
        return
    with pytest.raises(CheckpointError) as found:
        read_torch_save(path)
    said = str(found.value)
    assert "\n" not in said and any(words in said for words in ("a.pt: expected", "a.pt: a tensor", "a pickle"))


def test_a_member_that_is_compressed_is_not_unpacked(tmp_path):
    path = archive(tmp_path / "a.pt", b"\x80\x02" + tensor() + b".", {"data/0": bytes(1 << 24)}, compressed=True)
    assert path.stat().st_size < 1 << 16
    with pytest.raises(CheckpointError, match="is compressed"):
        read_torch_save(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_change_to_a_file_of_torch_gives_a_value_or_an_error(data):
    stream = io.BytesIO()
    torch.save({"a": BASE, "b": [1, (2.5, "x")], "c": torch.float16}, stream)
    content = bytearray(stream.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_torch_save(io.BytesIO(bytes(content)))
    except CheckpointError as error:
        assert "\n" not in str(error)


# Folders


@pytest.fixture
def folder(tmp_path):
    "A folder of `torch.distributed.checkpoint`."
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": {"w": BASE, "list": [BASE + 1, BASE + 2]}, "step": 7, "names": ["a", "b"]},
                 checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_a_folder_comes_back_nested_as_it_was_with_its_lists(folder):
    found = read_dcp_folder(folder)
    assert found["model"]["w"].equal(BASE) and [t.tolist() for t in found["model"]["list"]] == [
        (BASE + 1).tolist(), (BASE + 2).tolist()]
    assert found["step"] == 7 and list(found["names"]) == ["a", "b"]


def changed(folder, change):
    "Change the plan of a folder as whoever wrote it could."
    with open(folder / ".metadata", "rb") as file:
        plan = pickle.load(file)  # noqa: S301 (written by the fixture)
    change(plan)
    with open(folder / ".metadata", "wb") as file:
        pickle.dump(plan, file)


def chunk_of(plan, name="model.w"):
    "The one chunk of a tensor."
    return plan.state_dict_metadata[name].chunks[0]


def place_of(plan, name="model.w"):
    "Where a chunk's bytes lie."
    return next(info for index, info in plan.storage_data.items() if index.fqn == name)


def resize(plan, size):
    "Make a tensor look larger, chunk and all."
    plan.state_dict_metadata["model.w"].size = torch.Size(size)
    chunk_of(plan).sizes = torch.Size(size)


PLANS = {
    "a tensor with a hole": (lambda p: setattr(chunk_of(p), "sizes", torch.Size([2, 4])), "do not cover"),
    "a tensor without chunks": (lambda p: p.state_dict_metadata["model.w"].chunks.clear(), "do not cover"),
    "a chunk that is another": (lambda p: resize(p, [4, 3]), "another shape or dtype"),
    "an endless tensor": (lambda p: resize(p, [1 << 40, 4]), "far more than the file holds"),
    "a path upwards": (lambda p: setattr(place_of(p), "relative_path", "../secret"), "the name of a file in it"),
    "an absolute path": (lambda p: setattr(place_of(p), "relative_path", "/etc/passwd"), "the name of a file in it"),
    "the folder itself": (lambda p: setattr(place_of(p), "relative_path", ".."), "the name of a file in it"),
    "a path that is none": (lambda p: setattr(place_of(p), "relative_path", 7), "the name of a file in it"),
    "a negative offset": (lambda p: setattr(place_of(p), "offset", -4), "bytes from -4 on, the file has"),
    "an endless length": (lambda p: setattr(place_of(p), "length", 1 << 60), f"expected {1 << 60} bytes from"),
    "no place": (lambda p: p.storage_data.clear(), "does not fit"),
    "two of one name": (lambda p: p.planner_data.update({"model.list.0": ("model", "w")}), "two values"),
    "a list with a hole": (lambda p: p.planner_data.update({"model.list.0": ("model", "list", 5)}), "does not fit"),
    "a name below a tensor": (lambda p: p.planner_data.update({"model.list.0": ("model", "w", "x")}), "does not fit"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_does_not_fit_its_files_is_refused(folder, name):
    change, word = PLANS[name]
    (folder.parent / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())
    changed(folder, change)
    with pytest.raises(CheckpointError, match=word) as found:
        read_dcp_folder(folder)
    assert "\n" not in str(found.value)


def test_a_link_out_of_the_folder_is_not_followed(folder):
    data = folder / "__0_0.distcp"
    data.rename(folder.parent / "elsewhere")
    data.symlink_to(folder.parent / "elsewhere")
    with pytest.raises(OSError, match="symbolic|Too many"):
        read_dcp_folder(folder)


def test_a_global_is_described_and_not_looked_up():
    assert read_inert(pickle.dumps(eval, protocol=4)).name.endswith("eval")
