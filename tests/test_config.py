"""The configuration: properties of the canonical form, golden fingerprints, files nobody should have written."""

import copy
import enum
import hashlib
import json
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fault_tolerant_transformer_lab.config import (
    ABSENT,
    IDENTITY_FIELDS,
    OPERATION_FIELDS,
    ConfigError,
    Drift,
    Elastic,
    Expected,
    ExperimentConfig,
    FrozenConfig,
    Mark,
    Schedule,
    apply_overrides,
    canonical_json,
    config_fields,
    drift,
    fingerprint,
    load_config,
    parse_overrides,
    parse_value,
    role_of,
    shipped_config,
    shown,
    to_plain,
)

REPOSITORY = Path(__file__).resolve().parents[1]
SMOKE = {
    "vocab_size": 64, "block_size": 16, "d_model": 32, "n_heads": 4, "n_layers": 2, "dropout": 0.0, "seed": 2712,
    "steps": 8, "batch_size": 4, "learning_rate": 3e-4, "checkpoint_every": 4,
}  # fmt: skip

# A release's fingerprints never change: every checkpoint made with it carries one of them.
GOLDEN = {
    "smoke": "b5ce717733637e3f604501f4fe4804de74da1e54231d7ce8a8461ff059396742",
    "pydoc-cpu": "53071963ef690a2a26ce18c6f26596dc9c652efcbc5ee75c50b8735c6d7cc6c3",
    "pydoc-full-state": "fa7946654985c521059edbc594efe103ac35eb1bfec2c5f2347ba3c6eca4df39",
}

leaves = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
plain_data = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
close_leaves = st.sampled_from([None, True, False, 0, 1, 0.0, -0.0, 1.0, "", "1", [], {}])
close_data = st.recursive(
    close_leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
)


def equal_in_type_too(a: Any, b: Any) -> bool:
    """An oracle that shares no code with the module: equality that descends and compares types and signs of zero."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_in_type_too(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal_in_type_too, a, b))
    return a == b and str(a) == str(b)


def config(**changes: Any) -> ExperimentConfig:
    return ExperimentConfig(**SMOKE).replace(**changes)


# The canonical form


@given(plain_data)
def test_canonical_json_reads_back_as_the_same_value(value):
    text = canonical_json(value)
    assert text.isascii() and "\n" not in text
    assert equal_in_type_too(json.loads(text), value)


@given(close_data, close_data)
@settings(max_examples=500)
def test_one_text_means_one_value(a, b):
    assert (canonical_json(a) == canonical_json(b)) == equal_in_type_too(a, b)


@given(st.dictionaries(st.text(), plain_data))
def test_the_order_of_keys_does_not_matter(value):
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


@given(close_data, close_data)
@settings(max_examples=500)
def test_drift_and_fingerprint_never_disagree(a, b):
    assert (drift(a, b) == []) == (fingerprint(a) == fingerprint(b))


def put(value: Any, field: str, new: Any) -> Any:
    """`value` with the field of a drift set or removed; keys in these tests hold no dots or brackets."""
    if not field:
        return new
    value = json.loads(json.dumps(value))  # a deep copy in which no two parts are one object
    *parents, last = [int(p) if p.isdigit() else p for p in field.replace("[", ".").replace("]", "").split(".") if p]
    here = value
    for part in parents:
        here = here[part]
    if new is ABSENT:
        del here[last]
    else:
        here[last] = new
    return value


@given(close_data, close_data)
@settings(max_examples=500)
def test_drift_lists_everything_that_differs(a, b):
    patched = a
    for difference in drift(a, b):
        patched = put(patched, difference.field, difference.requested)
    assert equal_in_type_too(patched, b)


@given(close_data, close_data)
def test_drift_read_from_the_other_side_is_the_mirror(a, b):
    there = {(d.field, shown(d.checkpoint), shown(d.requested)) for d in drift(a, b)}
    back = {(d.field, shown(d.requested), shown(d.checkpoint)) for d in drift(b, a)}
    assert there == back


def test_drift_on_nested_data_names_the_dotted_field():
    saved = {"config": config(), "data": {"digest": "ab", "splits": [{"n": 1}, {"n": 2}]}}
    other = {"digest": "ab", "splits": [{"n": 1}, {"n": 3}]}
    requested = {"config": config(learning_rate=1e-3, steps=99), "data": other}
    assert [str(d) for d in drift(saved, requested)] == [
        "config.learning_rate: checkpoint 0.0003, requested 0.001",
        "data.splits[1].n: checkpoint 2, requested 3",
    ]


def test_absent_is_not_null():
    assert drift({}, {"ema": None}) == [Drift("ema", ABSENT, None)]
    assert str(drift({"ema": None}, {})[0]) == "ema: checkpoint null, requested absent"
    assert copy.deepcopy(ABSENT) is ABSENT and pickle.loads(pickle.dumps(ABSENT)) is ABSENT  # noqa: S301


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


def test_subclasses_of_plain_types_are_their_plain_value():
    assert canonical_json([Colour.RED, Level.HIGH]) == '["red",3]'
    assert {type(value) for value in to_plain([Colour.RED, Level.HIGH])} == {str, int}


def cycle() -> list[Any]:
    result: list[Any] = []
    result.append(result)
    return result


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "finite"),
        ([{"a": float("inf")}], "[0].a: expected a finite number"),
        ({1: 2}, "text for every key"),
        ({None: 2}, "text for every key"),
        ({"a": {"b": {1, 2}}}, "a.b: expected"),
        (b"bytes", "of type bytes"),
        ("\ud800", "UTF-8"),
        ({"\ud800": 1}, "UTF-8"),
        (1 << 5000, "2048 bits"),
        (cycle(), "64 levels"),
        (ExperimentConfig, "identity()"),
    ],
    ids=str,
)
def test_what_json_cannot_hold_is_refused_with_its_place(value, words):
    for function in (canonical_json, to_plain, fingerprint):
        with pytest.raises(ConfigError) as caught:
            function(value)
        assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1


# Identity


def test_golden_fingerprints_cover_every_shipped_experiment():
    shipped = {path.stem for path in (REPOSITORY / "configs").glob("*.json")}
    assert shipped == set(GOLDEN)
    assert {name: load_config(shipped_config(name)).fingerprint() for name in GOLDEN} == GOLDEN


def test_the_smoke_fingerprint_is_sha256_of_a_text_written_by_hand():
    by_hand = (
        '{"batch_size":4,"betas":[0.9,0.95],"block_size":16,"d_model":32,"data":"synthetic","dropout":0.0,'
        '"grad_accumulation":1,"grad_clip":null,"learning_rate":0.0003,"n_heads":4,"n_layers":2,"precision":"fp32",'
        '"schedule":{"floor":0.0,"horizon":null,"kind":"constant","warmup_steps":0},"seed":2712,"tokenizer":"none",'
        '"vocab_size":64,"weight_decay":0.0}'
    )
    assert canonical_json(config()) == by_hand
    assert hashlib.sha256(by_hand.encode()).hexdigest() == GOLDEN["smoke"] == config().fingerprint()


def test_the_smoke_file_holds_exactly_the_eleven_fields():
    text = (REPOSITORY / "configs" / "smoke.json").read_text()
    assert json.loads(text) == SMOKE and list(json.loads(text)) == list(SMOKE)
    assert [field.name for field in config_fields() if field.default is ABSENT] == list(SMOKE)


def test_every_field_has_one_role():
    assert set(IDENTITY_FIELDS) | set(OPERATION_FIELDS) == set(ExperimentConfig.model_fields)
    assert not set(IDENTITY_FIELDS) & set(OPERATION_FIELDS)
    assert OPERATION_FIELDS == ("steps", "checkpoint_every", "elastic", "keep_last", "checkpoint_mode",
                                "on_save_error", "eval_every", "log_every")
    assert all(field.mark.reason and field.mark.meaning for field in config_fields())
    with pytest.raises(ConfigError, match="did you mean learning_rate"):
        role_of("learning_rat")
    with pytest.raises(ConfigError, match="no fields of its own"):
        role_of("steps.more")


class NextRelease(ExperimentConfig):
    z_loss: Annotated[float, Expected("a number"), Mark("identity", "a weight", "adds", 0.1, since="0.10")] = 0.0
    colour: Annotated[str, Expected("a word"), Mark("operation", "of the bar", "shows", "red", since="0.2")] = "red"


def test_the_average_is_identity_from_the_moment_it_is_asked_for():
    assert config().identity().keys() ^ config(ema_decay=0.0).identity().keys() == {"ema_decay"}
    assert drift(config(), config(ema_decay=0.5)) == [Drift("ema_decay", ABSENT, 0.5)]
    by_hand = json.loads(canonical_json(config())) | {"ema_decay": 0.5}
    text = json.dumps(by_hand, sort_keys=True, separators=(",", ":"))
    assert config(ema_decay=0.5).fingerprint() == hashlib.sha256(text.encode()).hexdigest()


def test_logical_shards_are_the_micro_batches_and_no_second_identity():
    twelve = ExperimentConfig(**SMOKE, elastic={"logical_shards": 12})
    assert twelve.grad_accumulation == 12 and twelve.fingerprint() == config(grad_accumulation=12).fingerprint()
    assert config().elastic.logical_shards is None and config(elastic={}).grad_accumulation == 1
    plain = {**config().describe(), "elastic": {"logical_shards": 3}}
    with pytest.raises(ConfigError, match=r"elastic.logical_shards: expected the micro-batches of a step, "
                                          r"grad_accumulation 1, got 3; write the same number for both"):
        ExperimentConfig(**plain)
    assert ExperimentConfig(**{**plain, "grad_accumulation": 3}).elastic == Elastic(logical_shards=3)
    del plain["grad_accumulation"]
    assert ExperimentConfig(**{**plain, "elastic": Elastic(logical_shards=4)}).grad_accumulation == 4


def test_a_younger_field_at_its_default_leaves_old_checkpoints_resumable():
    upgraded = NextRelease(**SMOKE)
    assert upgraded.fingerprint() == GOLDEN["smoke"] and drift(config(), upgraded) == []
    assert drift(config(), upgraded.replace(z_loss=0.5, colour="blue")) == [Drift("z_loss", ABSENT, 0.5)]
    assert upgraded.describe()["z_loss"] == 0.0


@pytest.mark.parametrize("missing", ["Mark", "Expected"])
def test_a_field_without_a_role_cannot_be_defined(missing):
    marks = {"Mark": Mark("identity", "a weight", "adds gradient"), "Expected": Expected("a number")}
    del marks[missing]
    annotation = Annotated[(float, *marks.values())]
    with pytest.raises(TypeError, match=rf"Unmarked.weight: expected {missing}\("):
        type("Unmarked", (FrozenConfig,), {"__annotations__": {"weight": annotation}})


sizes = st.integers(1, 2**63 - 1)
shares = st.floats(0, 1, exclude_max=True)
valid_changes = st.fixed_dictionaries(
    {},
    optional={
        "vocab_size": sizes,
        "block_size": sizes,
        "n_layers": sizes,
        "dropout": shares | st.just(0),
        "seed": st.integers(0, 2**64 - 1),
        "steps": sizes,
        "batch_size": sizes,
        "learning_rate": st.floats(0, exclude_min=True, allow_infinity=False) | st.integers(1, 10),
        "checkpoint_every": sizes,
        "data": st.just("synthetic") | st.text(min_size=1).map("tokens:{}".format),
        "weight_decay": st.floats(0, allow_infinity=False),
        "betas": st.tuples(shares, shares) | st.lists(shares, min_size=2, max_size=2),
        "grad_clip": st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
        "schedule": st.builds(Schedule, warmup_steps=st.integers(0, 9))
        | st.builds(
            Schedule,
            kind=st.just("cosine"),
            warmup_steps=st.integers(0, 9),
            horizon=st.integers(10, 2**63 - 1),
            floor=st.floats(0, 1),
        ),
        "grad_accumulation": sizes,
        "precision": st.sampled_from(["fp32", "bf16"]),
        "ema_decay": st.none() | shares,
        "keep_last": sizes,
        "checkpoint_mode": st.sampled_from(["sync", "async", "overlapped"]),
        "on_save_error": st.sampled_from(["stop", "continue"]),
        "eval_every": st.integers(0, 9),
        "log_every": sizes,
    },
)


@given(valid_changes)
def test_a_configuration_survives_its_own_description(changes):
    made = config(**changes)
    text = json.dumps(made.describe())
    assert ExperimentConfig.model_validate_json(text) == made
    assert ExperimentConfig.model_validate_json(text).fingerprint() == made.fingerprint()
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made  # noqa: S301
    assert hash(copy.copy(made)) == hash(made)


@given(valid_changes, valid_changes)
def test_exactly_the_identity_fields_move_the_fingerprint(first, second):
    a, b = config(**first), config(**second)
    moved = {difference.field.partition(".")[0] for difference in drift(a, b)}
    differs = {name for name in IDENTITY_FIELDS if getattr(a, name) != getattr(b, name)}
    if a.data.partition(":")[0] == b.data.partition(":")[0]:
        differs.discard("data")  # the path is where bytes lie, not what they are
    assert moved == differs
    assert (a.fingerprint() == b.fingerprint()) == (not moved)


# Refusals

WRONG = {
    "bool for int": ({"n_layers": True}, "n_layers", "got true"),
    "bool for float": ({"learning_rate": True}, "learning_rate", "got true"),
    "text for int": ({"steps": "8"}, "steps", 'got "8"'),
    "float for int": ({"steps": 8.0}, "steps", "got 8.0"),
    "null for int": ({"steps": None}, "steps", "got null"),
    "nan": ({"learning_rate": float("nan")}, "learning_rate", "got NaN"),
    "infinity": ({"weight_decay": float("inf")}, "weight_decay", "got Infinity"),
    "an integer no float holds": ({"learning_rate": 10**400}, "learning_rate", "a finite number above 0"),
    "not divisible": ({"d_model": 33}, "d_model", "a multiple of n_heads (4)"),
    "negative seed": ({"seed": -1}, "seed", "from 0 to 2**64 - 1"),
    "seed of 65 bits": ({"seed": 2**64}, "seed", "from 0 to 2**64 - 1"),
    "size of 64 bits": ({"d_model": 2**63}, "d_model", "an integer of at least 1"),
    "dropout of all": ({"dropout": 1.0}, "dropout", "below 1"),
    "dropout below none": ({"dropout": -0.1}, "dropout", "at least 0"),
    "one beta": ({"betas": [0.9]}, "betas", "two numbers"),
    "three betas": ({"betas": [0.9, 0.9, 0.9]}, "betas", "two numbers"),
    "betas as text": ({"betas": "0.9,0.95"}, "betas", "two numbers"),
    "beta of one": ({"betas": [0.9, 1]}, "betas[1]", "below 1"),
    "no clipping as zero": ({"grad_clip": 0.0}, "grad_clip", "or null"),
    "unknown precision": ({"precision": "fp16"}, "precision", '"fp32" or "bf16"'),
    "an average that never moves": ({"ema_decay": 1.0}, "ema_decay", "below 1, or null"),
    "unknown way to save": ({"checkpoint_mode": "later"}, "checkpoint_mode", '"sync", "async" or "overlapped"'),
    "unknown answer to a failed save": ({"on_save_error": "ignore"}, "on_save_error", '"stop" or "continue"'),
    "unknown source": ({"data": "corpus.txt"}, "data", '"text:PATH"'),
    "source without a path": ({"data": "text:"}, "data", '"text:PATH"'),
    "source with a lone surrogate": ({"data": "text:\ud800"}, "data", '"text:PATH"'),
    "text without a tokenizer": ({"data": "pydoc"}, "tokenizer", 'write "byte"'),
    "bytes that do not fit": ({"tokenizer": "byte"}, "vocab_size", "write 257"),
    "no room for the end": ({"tokenizer": "byte", "vocab_size": 256}, "vocab_size", "write 257"),
    "cosine without a horizon": ({"schedule": {"kind": "cosine"}}, "schedule.horizon", "got null"),
    "no logical shard": ({"elastic": {"logical_shards": 0}}, "elastic.logical_shards", "at least 1, or null"),
    "logical shards as text": ({"elastic": {"logical_shards": "4"}}, "elastic.logical_shards", 'got "4"'),
    "unknown in elastic": ({"elastic": {"shards": 4}}, "elastic.shards", "did you mean logical_shards?"),
    "elastic as a number": ({"elastic": 4}, "elastic", "an object"),
    "horizon inside the warm-up": (
        {"schedule": {"kind": "cosine", "warmup_steps": 9, "horizon": 9}}, "schedule.horizon", "than the warm-up of 9",
    ),
    "floor without a cosine": ({"schedule": {"floor": 0.5}}, "schedule.floor", "constant"),
    "bool inside": ({"schedule": {"warmup_steps": True}}, "schedule.warmup_steps", "got true"),
    "unknown inside": ({"schedule": {"warmup": 1}}, "schedule.warmup", "did you mean warmup_steps?"),
    "schedule as text": ({"schedule": "cosine"}, "schedule", "an object"),
    "unknown field": ({"learing_rate": 1.0}, "learing_rate", "did you mean learning_rate?"),
    "field like no other": ({"quux": 1}, "quux", "the fields are vocab_size, block_size"),
    "empty name": ({"": 1}, '""', "a known field"),
    "name that breaks the line": ({"a\nb": 1}, "a\nb", r'"a\nb"'),
}  # fmt: skip
SIZES = ("vocab_size", "block_size", "d_model", "n_heads", "n_layers", "steps", "batch_size", "grad_accumulation",
         "keep_last", "log_every")  # fmt: skip
WRONG |= {f"{name} of {n}": ({name: n}, name, f"at least 1, got {n}") for name in SIZES for n in (0, -3)}
WRONG |= {f"checkpoint_every of {n}": ({"checkpoint_every": n}, "checkpoint_every", f'at least 1, or "auto", got {n}')
          for n in (0, -3)}


@pytest.mark.parametrize(("changes", "field", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_value_is_refused_by_every_door(changes, field, words):
    complete = {**config().describe(), **changes}
    doors = [
        lambda: ExperimentConfig(**complete),
        lambda: config().replace(**changes),
        lambda: config().model_copy(update=changes),
        lambda: ExperimentConfig.model_validate(complete),
    ]
    for door in doors:
        with pytest.raises(ConfigError) as caught:
            door()
        message = str(caught.value)
        assert words in message and len(message.splitlines()) == 1
        assert [problem.field for problem in caught.value.problems] == [field]
        assert "pydantic" not in message and "Traceback" not in message
        assert caught.value.__cause__ is None


def test_all_faults_are_told_at_once_and_survive_a_process_boundary():
    with pytest.raises(ConfigError) as caught:
        config(n_heads=0, dropout=2, schedule={"kind": "linear", "horizon": 0}, sed=1)
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["n_heads", "dropout", "schedule.kind", "schedule.horizon", "sed"]
    copied = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert str(copied) == str(caught.value) and copied.problems == caught.value.problems


def test_a_message_stays_one_line_whatever_it_is_made_of():
    assert str(ConfigError("first\nsecond\u2028third")) == "first second third"


def test_missing_fields_are_named_with_an_example():
    with pytest.raises(ConfigError) as caught:
        ExperimentConfig()
    assert [problem.field for problem in caught.value.problems] == list(SMOKE)
    assert "seed: expected an integer from 0 to 2**64 - 1, got nothing; add it, for example 2712" in str(caught.value)


def test_a_configuration_cannot_be_changed_in_place():
    made = config()
    for attempt in (lambda: setattr(made, "seed", 1), lambda: delattr(made, "seed"), lambda: setattr(made, "new", 1),
                    lambda: setattr(made.schedule, "floor", 0.5)):  # fmt: skip
        with pytest.raises(ConfigError, match="frozen"):
            attempt()
    assert made == config()


def test_a_path_may_hold_what_a_file_system_allows():
    for path in ("a\nb", "a:b", " ", "Zoë/语料"):
        assert config(data=f"tokens:{path}").describe()["data"] == f"tokens:{path}"


def test_numbers_have_one_spelling():
    assert config(learning_rate=1) == config(learning_rate=1.0)
    assert canonical_json(config(learning_rate=1)) == canonical_json(config(learning_rate=1.0))
    assert config(dropout=-0.0).fingerprint() == config(dropout=0).fingerprint() == config().fingerprint()
    assert config(betas=[0, 0.5]).identity()["betas"] == [0.0, 0.5]


# Files


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


TEXT = json.dumps(SMOKE)
WRONG_FILES = {
    "duplicate key": (TEXT.replace('"steps": 8', '"steps": 8, "steps": 9').encode(), "steps: expected each key once"),
    "equal duplicate": (TEXT.replace('"steps": 8', '"steps": 8, "steps": 8').encode(), "steps: expected each key once"),
    "duplicate inside": (
        TEXT.replace('"steps"', '"schedule": {"kind": "constant", "kind": "cosine"}, "steps"').encode(),
        "kind: expected each key once",
    ),
    "NaN": (TEXT.replace("0.0003", "NaN").encode(), "learning_rate: expected a finite number above 0, got NaN"),
    "-Infinity": (TEXT.replace("8,", "-Infinity,").encode(), "steps: expected an integer of at least 1, got -Infinity"),
    "overflow": (TEXT.replace("0.0003", "1e999").encode(), "learning_rate: expected a finite number"),
    "underflow": (TEXT.replace("0.0003", "1e-999").encode(), "expected a finite number above 0, got 0.0"),
    "empty": (b"", "expected JSON, got a fault at line 1, column 1"),
    "zeros": (bytes(4096), "expected JSON"),
    "cut": (TEXT[:50].encode(), "expected JSON"),
    "trailing": (TEXT.encode() + b"{}", "expected JSON"),
    "list": (b"[]", "expected a JSON object, got []"),
    "text": (b'"smoke"', 'expected a JSON object, got "smoke"'),
    "null": (b"null", "expected a JSON object, got null"),
    "latin-1": (TEXT.replace("}", ', "data": "text:Zoë"}').encode("latin-1"), "expected UTF-8 text, got byte 0xeb"),
    "utf-16": (TEXT.encode("utf-16"), "expected UTF-8 text, got byte 0xff at offset 0"),
    "deep list": (b"[" * 200_000, "levels of nesting"),
    "deep object": (b'{"a":' * 200_000, "levels of nesting"),
    "long integer": (TEXT.replace("2712", "9" * 5000).encode(), "thousands of digits"),
    "too large": (b" " * (1 << 20) + TEXT.encode(), "at most 1048576 bytes"),
}


@pytest.mark.parametrize(("content", "words"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_wrong_file_is_refused_in_one_line_that_begins_with_its_name(here, content, words):
    (here / "wrong.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config("wrong.json")
    message = str(caught.value)
    assert message.startswith("wrong.json: ") and words in message
    assert len(message.splitlines()) == 1 and len(message) < 600


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere.json", "no file of that name"),
        (".", "a directory"),
        ("nowhere/at/all.json", "no file of that name"),
        ("loop.json", "symbolic links"),
        ("a\0b", "null byte"),
        ("x" * 5000, "File name too long"),
        ("/dev/zero", "at most 1048576 bytes"),
    ],
    ids=["missing", "directory", "missing folder", "loop", "zero byte", "long name", "endless device"],
)
def test_a_path_that_is_no_file_is_refused(here, path, words):
    (here / "loop.json").symlink_to("loop.json")
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_cannot_be_opened_is_refused(here):
    with socket.socket(socket.AF_UNIX) as server:  # nobody can open a socket's file, the superuser included
        server.bind("run.sock")
        with pytest.raises(ConfigError, match="^run.sock: expected a readable JSON file, got "):
            load_config("run.sock")


def test_a_byte_order_mark_and_any_spacing_are_accepted(here):
    (here / "bom.json").write_bytes(b"\xef\xbb\xbf" + TEXT.replace(",", "\r\n ,\t").encode())
    assert load_config("bom.json") == load_config(here / "bom.json") == config()


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(max_examples=300)
def test_no_bytes_bring_anything_but_a_config_error(content):
    with pytest.raises(ConfigError):
        ExperimentConfig.model_validate_json(content)


@given(st.dictionaries(st.sampled_from([*SMOKE, "schedule", "betas", "data", "x"]), close_data | plain_data))
@settings(max_examples=300)
def test_no_json_object_brings_anything_but_a_config_error(changes):
    try:
        ExperimentConfig(**{**SMOKE, **changes})
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1 and error.problems


# Overrides


def test_overrides_win_over_the_file_and_are_judged_together(here):
    (here / "run.json").write_text(TEXT)
    made = load_config("run.json", {"steps": 20, "schedule.kind": "cosine", "schedule.horizon": 30, "grad_clip": None})
    assert (made.steps, made.schedule.kind, made.schedule.horizon) == (20, "cosine", 30)
    with pytest.raises(ConfigError) as caught:
        load_config("run.json", {"steps": 0})
    assert str(caught.value) == (
        "run.json with steps overridden: steps: expected an integer of at least 1, got 0; write for example 8"
    )


def test_an_override_does_not_hide_a_duplicate_key(here):
    (here / "run.json").write_text(TEXT.replace('"steps": 8', '"steps": 8, "steps": 9'))
    with pytest.raises(ConfigError, match="each key once"):
        load_config("run.json", {"steps": 20})


def test_apply_overrides_leaves_its_arguments_alone():
    plain = {"schedule": {"kind": "constant"}}
    overrides = {"schedule.warmup_steps": 3, "schedule": Schedule(), "schedule.floor": 0.0}
    result = apply_overrides(plain, overrides)
    assert plain == {"schedule": {"kind": "constant"}} and overrides["schedule"] == Schedule()
    assert result["schedule"] == Schedule().describe()
    for name in ("steps.more", "steps.more.still"):
        with pytest.raises(ConfigError, match="steps has no fields of its own"):
            apply_overrides({"steps": 8}, {name: 1})


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("learning-rate=3e-4", 3e-4),
        ("learning_rate=.5", 0.5),
        ("learning_rate=1", 1.0),
        ("steps=+20", 20),
        ("steps=1_000", 1000),
        ("betas=0.9,0.99", (0.9, 0.99)),
        ("betas=[0.9, 0.99]", (0.9, 0.99)),
        ("grad-clip=none", None),
        ("grad_clip=null", None),
        ("tokenizer=none", "none"),
        ("data=tokens:a=b,c.bin", "tokens:a=b,c.bin"),
        ("data=tokens:1", "tokens:1"),
    ],
)
def test_text_of_a_command_line_becomes_the_value_of_its_field(assignment, value):
    (name, parsed), = parse_overrides([assignment]).items()
    assert getattr(config(**{name: parsed}), name) == value


@given(valid_changes)
def test_every_value_can_be_given_as_the_text_json_writes(changes):
    described = config(**changes).describe()
    described |= {f"schedule.{name}": value for name, value in described.pop("schedule").items()}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in described.items()}
    assert config(**{name: parse_value(name, text) for name, text in texts.items()}) == config(**changes)


@given(st.sampled_from([field.name for field in config_fields()]), st.text(max_size=20))
def test_no_text_of_a_command_line_brings_anything_but_a_config_error(name, text):
    try:
        config(**parse_overrides([f"{name}={text}"]))
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["steps"], "NAME=VALUE"),
        (["=3"], "NAME=VALUE"),
        (["steps=1", "steps=1"], "one override, got two"),
        (["grad-clip=1", "grad_clip=1"], "one override, got two"),
        (["steps=1e3"], "steps: expected an integer of at least 1, got 1000.0"),
        (["learning_rate=nan"], "learning_rate: expected a finite number above 0, got NaN"),
        (["learning_rate=NaN"], "expected a finite number"),
        (["lr=1"], "lr: expected a known field"),
        (["seed=true"], "seed: expected an integer from 0 to 2\\*\\*64 - 1, got true"),
        (['schedule={"kind": "cosine", "kind": "constant"}'], "each key once"),
    ],
)
def test_wrong_overrides_are_refused(assignments, words):
    with pytest.raises(ConfigError, match=words):
        config(**parse_overrides(assignments))


# What importing costs


def test_the_module_imports_without_torch_or_numpy_and_says_nothing():
    code = (
        "import sys; from fault_tolerant_transformer_lab import config; "
        "print(sorted({'torch', 'numpy', 'nbdev', 'fastcore', 'IPython', 'matplotlib'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]" and run.stderr == ""
