"""Fuzz the reader of headers for a bounded time, guided by coverage: `fuzz_header.py FOLDER LIMIT`. Needs atheris.

LIMIT is an option of libFuzzer: `-runs=N` or `-max_total_time=SECONDS`.

What the fuzzer makes up is the header's text; the digest that a header needs to be read at all is put on it, else
nothing behind that check would ever be reached. A header is refused by a `CheckpointError`, or reads as the state whose
digest it names: nearly always the same state, but a fuzzer that follows comparisons can learn another digest.
Whatever else happens is a crash, and atheris ends with it.
"""

import sys
from dataclasses import fields, replace
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fault_tolerant_transformer_lab.checkpoint_file", "json"]):
    from fault_tolerant_transformer_lab.checkpoint_file import (
        CheckpointError,
        encode,
        open_checkpoint,
        state_digest,
        verify,
    )

from fault_tolerant_transformer_lab.contract import Snapshot, map_tensors
from fault_tolerant_transformer_lab.crashes import forgeries, sealed, two_checkpoints


def snapshot_of(path: Path, **changed) -> Snapshot:  # path: a checkpoint file; changed: fields to replace
    "Load a file, to be encoded again."
    loaded = {}
    with open_checkpoint(path) as saved:
        tree = map_tensors(saved.tree, lambda leaf: loaded.setdefault(leaf.name, leaf.load()))
        return replace(Snapshot(**{field.name: getattr(saved, field.name) for field in fields(Snapshot)}),
                       tree=tree, **changed)


folder, limit = Path(sys.argv[1]), sys.argv[2]
good, _ = two_checkpoints(folder / "run")
n_header = 8 + int.from_bytes(good[:8], "little")
corpus = folder / "corpus"
corpus.mkdir()
(corpus / "good").write_bytes(good[8:n_header].rstrip())
for i, forged in enumerate(forgeries(good)):
    size = int.from_bytes(forged.data[:8], "little")
    if size < 1 << 16:
        (corpus / str(i)).write_bytes(forged.data[8:8 + size].rstrip())
path = folder / "fuzzed"
path.write_bytes(good)
*_, (_, another) = encode(snapshot_of(path, step=10)).chunks()  # another state, of the same tensors: its header
(corpus / "another").write_bytes(bytes(another[8:]).rstrip())


def read(raw: bytes) -> None:  # raw: what the fuzzer made up
    "Seal it, and have it read."
    text = raw.decode("utf-8", "ignore")
    at = text.find('file_digest\\":\\"')
    if at >= 0:
        at += len('file_digest\\":\\"')
        text = text[:at] + "0" * 64 + text[at + 64:]
    path.write_bytes(sealed(text, good[n_header:]))
    try:
        digest = verify(path).state_digest
    except CheckpointError:
        return
    if digest.encode() not in good:
        assert state_digest(snapshot_of(path)) == digest, "what it reads as is not what it says that it is"


atheris.Setup([sys.argv[0], str(corpus), limit, "-max_len=20000", "-rss_limit_mb=4096",
               f"-artifact_prefix={folder}/"], read)
atheris.Fuzz()
