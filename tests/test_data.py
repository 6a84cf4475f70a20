"Data: index arithmetic against independent references, files as they come in the world, and each refusal."

import errno
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from fault_tolerant_transformer_lab import data
from fault_tolerant_transformer_lab.config import ExperimentConfig, load_config
from fault_tolerant_transformer_lab.data import (
    ByteTokenizer,
    DataError,
    Permutation,
    StepBatches,
    SyntheticReader,
    TokenStream,
    evaluation_batches,
    open_data,
    sample_generator,
    split_documents,
    split_tail,
)

SMOKE = load_config("configs/smoke.json")


def experiment(**changes) -> ExperimentConfig:
    "The smoke experiment with some fields changed."
    return ExperimentConfig(**{**SMOKE.describe(), **changes})


def text_experiment(path: Path, **changes) -> ExperimentConfig:
    "The smoke experiment on text."
    return experiment(**{"data": f"text:{path}", "tokenizer": "byte", "vocab_size": 257, "block_size": 4, **changes})


def synthetic(n_tokens: int, vocab_size: int = 64) -> TokenStream:
    "A synthetic source of any length."
    about = dict(vocab_size=vocab_size, kind="test", tokenizer="none", split={}, about={})
    return TokenStream(SyntheticReader(vocab_size), n_tokens, **about)


# Promises about bits: a later release that breaks one of these breaks every run that is to be resumed.


def test_the_windows_of_the_smoke_experiment_are_these_forever():
    source = open_data(SMOKE).train
    batches = StepBatches(source, block_size=16, batch_size=4, seed=2712)
    assert batches.window_indices(0).tolist() == [23586, 19241, 31340, 14625]
    assert batches.window_indices(10**9).tolist() == [8695, 50461, 14019, 57418]
    assert source.identity() == {
        "kind": "synthetic", "n_tokens": 1048576, "tokenizer": "none",
        "split": {"part": "train", "rule": "positions", "first": 0},
        "digest": "0590fd34c6b30e65e095d80c99ad886dba5451766e6a0d620f4baad9942289ab",
    }
    [batch] = batches.batch(0)
    assert batch.digest().hex() == "e26e965449085b2369b9a72a7eaaae396fe3c967571890d294c8bf37ebc8d233"


def test_the_generator_of_a_sample_is_this_forever():
    assert sample_generator(2712, 3, 1).integers(0, 1000, 6).tolist() == [495, 628, 462, 94, 988, 977]


def test_the_rules_of_splits_are_named_as_checkpoints_hold_them(tmp_path):
    for name in "abcdefghijkl":
        (tmp_path / name).write_text(f"text {name}")
    documents = open_data(text_experiment(tmp_path))
    tail = open_data(text_experiment(tmp_path / "a"))
    assert documents.train.identity()["split"] == {"part": "train", "rule": "content-hash-tenth"}
    assert documents.validation.identity()["split"] == {"part": "validation", "rule": "content-hash-tenth"}
    assert tail.train.identity()["split"] == {"part": "train", "rule": "last-tenth-of-windows"}


# The permutation.


def reference_permutation(n: int, key: bytes, i: int) -> int:
    "The network in Python's integers, written from its description."
    rows = next(r for r in range(max(1, int((n - 1) ** 0.5) - 2), n + 2) if r * r >= n)
    columns = (n + rows - 1) // rows
    stream = blake3(key).digest(96)
    keys = [int.from_bytes(stream[j : j + 8], "little") for j in range(0, 96, 8)]

    def mix(x: int, k: int) -> int:
        z = x ^ k
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return (z ^ (z >> 31)) >> 1

    while True:
        row, column = divmod(i, columns)
        for j in range(0, 12, 2):
            row = (row + mix(column, keys[j])) % rows
            column = (column + mix(row, keys[j + 1])) % columns
        i = row * columns + column
        if i < n:
            return i


@given(st.integers(1, 3000), st.binary(max_size=40), st.sampled_from([2, 4, 12]))
@settings(deadline=None)
def test_a_permutation_is_a_bijection_at_every_size_under_every_key(n, key, rounds):
    assert sorted(Permutation(n, key, rounds=rounds)(np.arange(n)).tolist()) == list(range(n))


@given(st.integers(1, 2**62), st.binary(max_size=40), st.data())
@settings(deadline=None)
def test_a_permutation_equals_its_description_in_exact_integers(n, key, draw):
    positions = draw.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8))
    order = Permutation(n, key)
    mapped = order(np.array(positions))
    assert mapped.dtype == np.int64
    assert mapped.tolist() == [reference_permutation(n, key, i) for i in positions] == [order(i) for i in positions]


def test_the_hash_keeps_to_63_bits_so_that_no_sum_wraps():
    mixed = data._mix(np.arange(4096, dtype=np.uint64), np.uint64(2**64 - 1))
    assert int(mixed.max()) < 2**63 and len(np.unique(mixed)) == 4096
    assert int(mixed.max()) + 2**31 < 2**64  # the largest row or column of the largest table


def test_a_permutation_keeps_shape_and_refuses_what_is_outside():
    order = Permutation(12, b"")
    assert order(np.arange(12).reshape(3, 4)).shape == (3, 4) and order(np.array([], dtype=np.int64)).shape == (0,)
    for outside in (-1, 12, np.array([0, 12]), np.array([-1, 3])):
        with pytest.raises(ValueError, match=r"expected positions in range\(12\)"):
            order(outside)
    for n, rounds in ((0, 12), (2**62 + 1, 12), (5, 3), (5, 0)):
        with pytest.raises(ValueError, match="expected 1 to"):
            Permutation(n, b"", rounds=rounds)


# Batches.


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 3), st.integers(1, 5), st.integers(-(2**63), 2**64 - 1))
@settings(deadline=None)
def test_every_epoch_reads_every_window_once(n_windows, batch_size, accumulation, block_size, seed):
    source = synthetic(n_windows * block_size + 1)
    sizes = dict(block_size=block_size, batch_size=batch_size, grad_accumulation=accumulation)
    batches = StepBatches(source, seed=seed, **sizes)
    assert batches.n_windows == n_windows
    n_steps = -(-4 * n_windows // (batch_size * accumulation))
    read = np.concatenate([batches.window_indices(step) for step in reversed(range(n_steps))][::-1])
    for epoch in read[: 4 * n_windows].reshape(4, n_windows):
        assert sorted(epoch.tolist()) == list(range(n_windows))
    for step in range(n_steps):
        assert batches.epoch_of(step) == step * batch_size * accumulation // n_windows


@given(st.integers(0, 10**30), st.integers(18, 4000))
@settings(deadline=None)
def test_a_batch_holds_the_tokens_of_its_windows_at_any_step(step, n_tokens):
    batches = StepBatches(synthetic(n_tokens), block_size=8, batch_size=3, seed=5, grad_accumulation=2)
    windows = batches.window_indices(step).tolist()
    micro = batches.batch(step)
    rows = [torch.cat([batch.inputs_BT, batch.targets_BT[:, -1:]], dim=1) for batch in micro]
    assert [tuple(row.shape) for row in rows] == [(3, 9), (3, 9)]
    for window, row in zip(windows, torch.cat(rows), strict=True):
        assert row.tolist() == [(17 * p + 3 * p * p + 11) % 64 for p in range(8 * window, 8 * window + 9)]
    assert all(torch.equal(batch.inputs_BT[:, 1:], batch.targets_BT[:, :-1]) for batch in micro)


def test_two_epochs_and_two_seeds_have_other_orders():
    source = synthetic(16 * 1000 + 1)
    first, second = (StepBatches(source, block_size=16, batch_size=1000, seed=seed) for seed in (1, 2))
    orders = [first.window_indices(0), first.window_indices(1), second.window_indices(0), second.window_indices(1)]
    for i, a in enumerate(orders):
        for b in orders[i + 1 :]:
            assert (a == b).sum() < 10  # chance agrees at about one place


def test_a_batch_digest_covers_values_shape_and_targets():
    inputs, targets = torch.arange(8).reshape(2, 4), torch.arange(1, 9).reshape(2, 4)
    digest = data.Batch(inputs, targets).digest()
    assert len(digest) == 32 and digest == data.Batch(inputs.clone(), targets.clone()).digest()
    reshaped = inputs.reshape(4, 2), targets.reshape(4, 2)
    other = [reshaped, (inputs, targets + 1), (targets, inputs), (inputs + 1, targets)]
    assert len({digest, *(data.Batch(*tensors).digest() for tensors in other)}) == 5
    strided = torch.arange(16).reshape(2, 8)[:, :4]
    assert data.Batch(strided, targets).digest() == data.Batch(strided.contiguous(), targets).digest()


def test_sizes_and_steps_below_their_range_are_refused():
    source = synthetic(100)
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="expected sizes of 1 or more"):
            StepBatches(source, block_size=sizes[0], batch_size=sizes[1], seed=1, grad_accumulation=sizes[2])
    with pytest.raises(ValueError, match="expected a step of 0 or more, got -1"):
        StepBatches(source, block_size=4, batch_size=1, seed=1).batch(-1)
    with pytest.raises(DataError, match="expected 101 tokens or more for a window, got 100"):
        StepBatches(source, block_size=100, batch_size=1, seed=1)


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 7))
@settings(deadline=None)
def test_evaluation_reads_different_windows_spread_from_the_start(n_windows, batch_size, n_batches):
    source = synthetic(n_windows * 4 + 1, vocab_size=10**6)  # below 577 positions no two tokens are equal
    sizes = dict(block_size=4, batch_size=batch_size, n_batches=n_batches)
    batches = evaluation_batches(source, **sizes)
    starts = [row[0].item() for batch in batches for row in batch.inputs_BT]
    assert len(set(starts)) == len(starts) == min(n_windows, batch_size * n_batches)
    assert starts[0] == 11
    assert [b.digest() for b in batches] == [b.digest() for b in evaluation_batches(source, **sizes)]


def test_evaluation_windows_are_spread_evenly():
    batches = evaluation_batches(synthetic(10 * 4 + 1, vocab_size=10**6), block_size=4, batch_size=2, n_batches=2)
    positions = [4 * window for window in (0, 2, 5, 7)]  # a quarter of ten windows apart
    starts = [row[0].item() for batch in batches for row in batch.inputs_BT]
    assert starts == [17 * p + 3 * p * p + 11 for p in positions]


def test_generators_of_samples_differ_in_each_of_their_keys():
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0), (2**64 - 1, 0, 0), (0, 2**64, 0)]
    assert len({sample_generator(*key).integers(2**63) for key in keys}) == len(keys)
    assert sample_generator(5, 10**18, 3).random() == sample_generator(5, 10**18, 3).random()


# Sources.


@given(st.integers(1, 2**31), st.integers(0, 2**200), st.integers(0, 20))
def test_the_synthetic_stream_is_exact_at_any_position(vocab_size, start, n):
    expected = [(17 * p + 3 * p * p + 11) % vocab_size for p in range(start, start + n)]
    assert SyntheticReader(vocab_size)(start, n).tolist() == expected
    assert SyntheticReader(vocab_size, first=7)(start, n).tolist() == SyntheticReader(vocab_size)(start + 7, n).tolist()


def test_the_synthetic_source_refuses_a_tokenizer_and_a_vocabulary_it_cannot_compute():
    with pytest.raises(DataError, match='expected tokenizer "none", got "byte"'):
        open_data(experiment(tokenizer="byte", vocab_size=257))
    with pytest.raises(DataError, match="exact up to vocab_size 2147483648, got 2147483649"):
        open_data(experiment(vocab_size=2**31 + 1))
    splits = open_data(SMOKE)
    p = 2**20  # validation goes on where training ends
    assert splits.validation.read(0, 3).tolist() == [(17 * q + 3 * q * q + 11) % 64 for q in (p, p + 1, p + 2)]


@given(st.text())
def test_text_survives_the_tokenizer(text):
    tokens = ByteTokenizer().encode(text)
    assert tokens.dtype == np.int64 and tokens.tolist() == list(text.encode())
    assert ByteTokenizer().decode(tokens) == text


@given(st.lists(st.integers(-5, 2**40)))
def test_decoding_never_raises(tokens):
    decoded = ByteTokenizer().decode(tokens)
    assert decoded.count("\f") == tokens.count(256) + tokens.count(ord("\f"))


def test_tokens_that_stand_for_no_text_are_left_out():
    assert ByteTokenizer().decode([-1, 72, 2**40, 257, 105, -191]) == "Hi"


documents = st.lists(st.binary(min_size=1, max_size=3), min_size=1, max_size=30)


@given(documents, st.randoms())
def test_a_split_is_a_partition_that_knows_no_order(texts, random):
    train, validation = split_documents(texts)
    assert Counter(train) + Counter(validation) == Counter(texts)
    assert not set(train) & set(validation)  # copies of one text stay together
    assert [t for t in texts if t in set(train)] == train
    assert train and bool(validation) == (len(set(texts)) > 1)
    shuffled = list(texts)
    random.shuffle(shuffled)
    assert tuple(map(set, split_documents(shuffled))) == (set(train), set(validation))


@given(documents, st.binary(min_size=4, max_size=8))
def test_a_new_document_moves_no_other_once_the_split_is_not_forced(texts, new):
    train, validation = split_documents(texts)
    threshold = 2**64 // 10
    natural = {t for t in texts if int.from_bytes(blake3(t).digest(8), "big") < threshold}
    if natural == set(validation) and natural:
        again = split_documents([*texts, new])
        assert set(validation) <= set(again[1]) and set(train) <= set(again[0])


@given(st.integers(0, 5000), st.integers(1, 50))
def test_a_tail_split_shares_one_token_and_loses_no_window(n_tokens, block_size):
    n_train, first = split_tail(n_tokens, block_size)
    n_windows = max(0, (n_tokens - 1) // block_size)
    windows = [max(0, (n - 1) // block_size) for n in (n_train, n_tokens - first)]
    assert sum(windows) == n_windows
    if n_windows < 2:
        assert (n_train, first) == (n_tokens, n_tokens)
    else:
        assert windows[1] == max(1, n_windows // 10) and first == n_train - 1


def test_a_folder_is_read_in_the_order_of_relative_names_without_hidden_linked_or_special_entries(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "a").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name in ("b.txt", "c.txt", "a/z.txt", ".hidden", ".git/config"):
        (folder / name).write_text(f"<{name}>")
    (folder / "empty.txt").touch()
    (tmp_path / "outside.txt").write_text("<outside>")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe")
    splits = open_data(text_experiment(folder))
    parts = [s.read(0, s.n_tokens) for s in (splits.train, splits.validation)]
    texts = [ByteTokenizer().decode(part).split("\f")[:-1] for part in parts]
    assert sorted(texts[0] + texts[1]) == ["<a/z.txt>", "<b.txt>", "<c.txt>"] and all(sorted(t) == t for t in texts)
    assert splits.train.describe()["files"] == 4 and splits.train.describe()["passed_over"] == 5
    through_a_link = tmp_path / "link"
    through_a_link.symlink_to(folder)
    assert open_data(text_experiment(through_a_link)).train.identity() == splits.train.identity()


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_an_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "t").write_text("text enough for a window")
    real = os.scandir

    def scandir(path):
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(data.os, "scandir", scandir)  # a root user may list any folder
    with pytest.raises(DataError, match="cannot read '.*closed': Permission denied"):
        open_data(text_experiment(tmp_path))


def test_text_keeps_its_bytes_line_ends_and_byte_order_mark(tmp_path):
    content = b"\xef\xbb\xbfone\r\ntwo\rthree\n\x00"
    (tmp_path / "t").write_bytes(content)
    source = open_data(text_experiment(tmp_path / "t", block_size=15)).train
    assert source.read(0, source.n_tokens).tolist() == [*content, 256]


def test_one_text_is_split_by_position_and_a_short_one_has_no_validation(tmp_path):
    (tmp_path / "t").write_text("x" * 100)
    splits = open_data(text_experiment(tmp_path / "t"))  # 101 tokens: 25 windows of 4, 2 held out
    assert (splits.train.n_tokens, splits.validation.n_tokens) == (93, 9)
    assert open_data(text_experiment(tmp_path / "t", block_size=60)).validation is None
    (tmp_path / "copies").mkdir()
    for name in "ab":
        (tmp_path / "copies" / name).write_text("same text")
    assert open_data(text_experiment(tmp_path / "copies")).train.identity()["split"]["rule"] == "last-tenth-of-windows"


def test_a_validation_part_shorter_than_a_window_is_dropped(tmp_path):
    long = "long " * 10
    short = next(c for c in "abcdefghijkl" if split_documents([long.encode(), c.encode()])[1] == [c.encode()])
    (tmp_path / "long").write_text(long)
    (tmp_path / "short").write_text(short)
    assert open_data(text_experiment(tmp_path, block_size=1)).validation.read(0, 2).tolist() == [ord(short), 256]
    assert open_data(text_experiment(tmp_path, block_size=2)).validation is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc\xff", r"expected UTF-8 in '.*bad.txt', got 0xff at byte 3 \(invalid start byte\)"),
        ("é".encode()[:1], "got 0xc3 at byte 0 .unexpected end of data"),
        (b"\xed\xa0\x80", "got 0xed at byte 0"),  # a lone surrogate
        (b"ok " * 50000 + b"\xc0\x80", "got 0xc0 at byte 150000"),
    ],
)
def test_bytes_that_are_not_utf8_are_named_with_file_and_offset(tmp_path, content, message):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "bad.txt").write_bytes(content)
    for path in (tmp_path, tmp_path / "bad.txt"):
        with pytest.raises(DataError, match=message):
            open_data(text_experiment(path))


def test_paths_that_are_missing_impossible_or_no_file_are_refused_in_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "line\nbreak").mkdir()
    for kind in ("text", "tokens"):
        for name in ("missing", "pipe", "empty", "nul\0byte", "line\nbreak", "x" * 300):
            changes = {"tokenizer": "byte", "vocab_size": 257} if kind == "text" else {}
            with pytest.raises(DataError) as caught:
                open_data(experiment(data=f"{kind}:{tmp_path / name}", **changes))
            assert len(str(caught.value).splitlines()) == 1 and ": " in str(caught.value)


# Token files.


def token_file(path: Path, tokens, dtype: str = "<u2") -> Path:
    "Write a flat token file."
    np.asarray(tokens).astype(dtype).tofile(path)
    return path


def test_token_files_of_both_widths_read_alike_and_are_one_identity(tmp_path):
    tokens = np.random.default_rng(1).integers(0, 64, 500_000)
    two, four = token_file(tmp_path / "two", tokens), token_file(tmp_path / "four", tokens, "<u4")
    sources = [open_data(experiment(data=f"tokens:{prefix}{path}")) for prefix, path in
               (("", two), ("uint16:", two), ("uint32:", four))]
    train = [splits.train.identity() for splits in sources]
    assert train[0] == train[1] == train[2]
    n = sources[0].train.n_tokens
    first = ((500_000 - 1) // 16 - (500_000 - 1) // 16 // 10) * 16
    assert n == first + 1
    assert train[0]["digest"] == blake3(tokens[:n].astype("<u4").tobytes()).hexdigest()  # across blocks of 2**18
    held_out = sources[2].validation
    assert np.array_equal(held_out.read(0, held_out.n_tokens), tokens[first:])


def test_tokens_of_32_bits_read_whole(tmp_path):
    path = token_file(tmp_path / "t", [0, 2**32 - 2, 65536] * 20, "<u4")
    source = open_data(experiment(data=f"tokens:uint32:{path}", vocab_size=2**32 - 1)).train
    assert source.read(0, 3).tolist() == [0, 2**32 - 2, 65536]


def test_a_folder_of_tokens_takes_both_files_whole(tmp_path):
    token_file(tmp_path / "train.bin", np.arange(64))
    with pytest.raises(DataError, match="expected train.bin and val.bin in .*, got no val.bin"):
        open_data(experiment(data=f"tokens:{tmp_path}"))
    token_file(tmp_path / "val.bin", np.arange(40))
    splits = open_data(experiment(data=f"tokens:{tmp_path}"))
    assert (splits.train.n_tokens, splits.validation.n_tokens) == (64, 40)
    assert splits.validation.identity()["split"] == {"part": "validation", "rule": "train.bin-val.bin"}


@pytest.mark.parametrize(
    ("prefix", "content", "message"),
    [
        ("", b"", "got 0 bytes"),
        ("", bytes(101), "expected 2 bytes for each uint16 token in .*, got 101 bytes"),
        ("uint32:", bytes(102), "expected 4 bytes for each uint32 token in .*, got 102 bytes"),
        ("", bytes(32), "expected at least one window of block_size [+] 1 = 17 tokens to train on, got 16"),
    ],
)
def test_a_token_file_of_the_wrong_size_is_refused(tmp_path, prefix, content, message):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_data(experiment(data=f"tokens:{prefix}{tmp_path / 't'}"))


def test_a_token_outside_the_vocabulary_is_found_where_it_is_read_and_by_the_identity(tmp_path):
    tokens = np.zeros(400)
    tokens[300] = 64
    source = open_data(experiment(data=f"tokens:{token_file(tmp_path / 't', tokens)}")).train
    assert source.read(0, 300).sum() == 0
    for read in (lambda: source.read(290, 20), source.identity):
        with pytest.raises(DataError, match="token 64 at position 300, but vocab_size is 64"):
            read()


def test_a_file_cut_short_under_a_run_is_an_error_and_a_replaced_one_is_still_the_old(tmp_path):
    path = token_file(tmp_path / "t", np.arange(400) % 64)
    source = open_data(experiment(data=f"tokens:{path}")).train
    os.replace(token_file(tmp_path / "new", np.zeros(400)), path)
    assert source.read(1, 3).tolist() == [1, 2, 3]
    source = open_data(experiment(data=f"tokens:{path}")).train
    os.truncate(path, 20)
    with pytest.raises(DataError, match="now ends at byte 20"):
        source.read(5, 10)


def test_short_reads_are_completed_and_a_failing_disk_is_an_error(tmp_path, monkeypatch):
    source = open_data(experiment(data=f"tokens:{token_file(tmp_path / 't', np.arange(400) % 64)}")).train
    real = os.pread
    monkeypatch.setattr(data.os, "pread", lambda descriptor, n, offset: real(descriptor, min(n, 3), offset))
    assert source.read(7, 9).tolist() == list(range(7, 16))

    def fail(descriptor, n, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(data.os, "pread", fail)
    with pytest.raises(DataError, match="at byte 14: Input/output error"):
        source.read(7, 9)


def test_opening_and_batching_compute_no_digest_and_the_identity_is_computed_once():
    reads = []

    def reader(start, n):
        reads.append(n)
        return np.zeros(n, dtype=np.int64)

    source = TokenStream(reader, 2**19, vocab_size=1, kind="test", tokenizer="none", split={}, about={})
    StepBatches(source, block_size=4, batch_size=2, seed=1).batch(5)
    assert reads == [5, 5]
    first = source.identity()
    assert reads == [5, 5, 2**18, 2**18] and source.identity() == first and len(reads) == 4
    first["digest"] = "spoiled"
    assert source.identity()["digest"] != "spoiled"


def test_file_descriptors_are_closed_with_their_source(tmp_path):
    path = token_file(tmp_path / "t", np.arange(400) % 64)
    before = len(os.listdir("/dev/fd"))
    splits = open_data(experiment(data=f"tokens:{path}"))
    assert len(os.listdir("/dev/fd")) == before + 2
    del splits
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_worker_processes_read_the_same_batches_from_a_file(tmp_path, start_method):
    source = open_data(experiment(data=f"tokens:{token_file(tmp_path / 't', np.arange(4000) % 61)}")).train
    batches = StepBatches(source, block_size=16, batch_size=2, seed=3)
    loader = DataLoader(
        batches, sampler=range(5), batch_size=None, num_workers=2 if start_method == "fork" else 1,
        multiprocessing_context=start_method, generator=torch.Generator(),
    )
    digests = [batch.digest() for step in loader for batch in step]
    assert digests == [batches.batch(step)[0].digest() for step in range(5)]
