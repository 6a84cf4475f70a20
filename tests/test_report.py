"""The page, the JUnit file and the command that runs a failing point again."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fault_tolerant_transformer_lab.cli import argument_from
from fault_tolerant_transformer_lab.config import ExperimentConfig, canonical_json
from fault_tolerant_transformer_lab.equivalence import Proof, Row, Verdict, example_run, prove_restart, prove_training
from fault_tolerant_transformer_lab.report import (
    command_for,
    difference_map,
    html_report,
    junit_report,
    lane_of,
    line_points,
)

quick = functools.partial(prove_restart, in_process=True, progress_bar=False)
LOST = functools.partial(example_run, fault="generator lost")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def failed() -> Proof:
    return quick(LOST, steps=5)


@pytest.fixture(scope="module")
def sound() -> Proof:
    return quick(example_run, steps=4)


class Page(HTMLParser):
    VOID = {"meta", "rect", "line", "polyline", "br"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list) -> None:
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open and self.open[-1] != "style" else ""


@pytest.mark.parametrize("which", ["failed", "sound"])
def test_the_page_is_whole_and_refers_to_nothing_outside(which: str, request: pytest.FixtureRequest) -> None:
    markup = html_report(request.getfixturevalue(which), "a run")
    page = Page(markup)
    assert page.open == [] and not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "href", "srcset", "onload"} & {name for name, _ in page.attributes}
    assert not re.search(r"url\((?!#)|@import|https?:", markup)


def test_the_page_of_a_failure_says_where_what_and_how_to_see_it_again(failed: Proof) -> None:
    page = Page(html_report(failed, "a run", LOST))
    words = " ".join(page.text.split())
    for expected in ("DIVERGENT", "First difference at step 2: model.0.weight", "generator torch_cpu:", "learning rate",
                     "the same in both", "What differed when", "optimizer.state[0].exp_avg", "Left out, one at a time",
                     "caught", "--point clean@1", "runs, of at most 5.5"):
        assert expected in words, expected
    labels = [value for name, value in page.attributes if name == "aria-label" and value]
    assert "loss by step" in labels and any("model.0.weight differs at steps 2, 3, 4, 5" in label for label in labels)


def test_the_page_says_how_many_differences_it_does_not_draw(failed: Proof) -> None:
    for n, told in ((40, False), (43, True)):
        row = replace(failed.rows[1], differing={2: [f"tensor {i}" for i in range(n)], 3: ["tensor 0"]})
        words = " ".join(Page(html_report(replace(failed, rows=(failed.rows[0], row)))).text.split())
        assert "tensor 39" in words and "tensor 40" not in words
        assert ("At least 3 tensors and values more differ" in words) is told


def test_the_page_of_a_sound_run_has_no_diagnosis_and_folds_what_is_equal(sound: Proof) -> None:
    words = Page(html_report(sound)).text
    assert "EQUIVALENT" in words and "Diagnosis" not in words and "more runs, all equal" in words


def test_markup_in_names_and_messages_stays_text(failed: Proof) -> None:
    evil = "</style><script>alert(1)</script><b onload=x>"
    row = replace(failed.rows[1], boundary=evil, differing={2: [evil]})
    hostile = replace(failed, reason=evil, rows=(failed.rows[0], row))
    assert "<script>" not in html_report(hostile, evil) and "<b " not in html_report(hostile, evil)
    assert ElementTree.fromstring(junit_report(hostile, evil)) is not None


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits_a_phone_and_a_desk_in_a_real_browser(width: int, failed: Proof, tmp_path: Path) -> None:
    "The browser itself is asked how wide the page's content became, by a script that only the test adds."
    probe = ("<script>const sizes = [...document.querySelectorAll('p,td,li')].map(e => parseFloat(getComputedStyle(e)"
             ".fontSize)); document.title = 'wide ' + document.documentElement.scrollWidth + ' of ' + innerWidth + "
             "' smallest ' + Math.min(...sizes)</script></body>")
    (tmp_path / "page.html").write_text(html_report(failed, "a run", LOST).replace("</body>", probe))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile",
               f"--window-size={width},2000", "--dump-dom", (tmp_path / "page.html").as_uri()]
    dom = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r"wide (\d+) of (\d+) smallest ([\d.]+)", dom)
    assert found, dom[:500]
    content, window, smallest = float(found[1]), float(found[2]), float(found[3])
    assert content <= window and smallest >= 12


@pytest.mark.parametrize(("fault", "verdict", "failures"), [
    ("", Verdict.EQUIVALENT, 0), ("nothing learned", Verdict.NOT_EXERCISED, 1),
    ("not deterministic", Verdict.NONDETERMINISTIC, 2), ("average left out", Verdict.NOT_EXERCISED, 1)])
def test_ci_is_red_whenever_the_verdict_is_not_equivalent(fault: str, verdict: Verdict, failures: int) -> None:
    proof = quick(functools.partial(example_run, fault=fault), steps=4, interrupt_at=[2])
    suite = ElementTree.fromstring(junit_report(proof)).find("testsuite")
    assert suite is not None and proof.verdict is verdict
    cases = suite.findall("testcase")
    assert (suite.get("tests"), suite.get("failures")) == (str(len(cases)), str(failures))
    assert (cases[0].find("failure") is None) is (verdict is Verdict.EQUIVALENT)


def test_a_failing_case_tells_how_to_run_it_again(failed: Proof) -> None:
    suite = ElementTree.fromstring(junit_report(failed, target=LOST)).find("testsuite")
    assert suite is not None
    texts = [case.find("failure").text for case in suite if case.find("failure") is not None]  # type: ignore[union-attr]
    assert "again: fttl prove --run fault_tolerant_transformer_lab.equivalence:example_run --with" in texts[1]
    point = shlex.split(texts[1].split("again: ")[1])[-1]
    again = quick(LOST, steps=5, points=[point], knock_out=False)
    assert [row.outcome for row in again.rows] == ["equal", "different"]


def test_an_error_is_an_error_and_escape_sequences_do_not_break_the_file() -> None:
    class Fails:
        def __init__(self) -> None:
            self.contract = example_run(Path()).contract

        def advance(self) -> float:
            raise RuntimeError("\x1b[31mred\x00")

    suite = ElementTree.fromstring(junit_report(quick(lambda directory: Fails(), steps=2))).find("testsuite")
    assert suite is not None and suite.get("errors") == "1" and suite.findall("testcase")[1].find("error") is not None


def test_a_function_that_nobody_can_import_leaves_a_blank(failed: Proof) -> None:
    command = command_for(failed, failed.rows[1], lambda directory: None)
    assert "--run MODULE:FUNCTION" in command and command == command_for(failed, failed.rows[1])


def pasted(command: str, folder: Path) -> dict:
    "Run a printed command in a shell, as whoever pastes it does, and give the row that it is about."
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(f"{command} --json", shell=True, cwd=folder, env={**os.environ, "PATH": path},
                          capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    (row,) = [row for row in json.loads(done.stdout)["rows"] if row["point"]]
    return row


def as_json(row: Row) -> dict:
    return json.loads(json.dumps(asdict(row)))


FEW = ("point", "outcome", "segments", "losses", "differing", "replayed")


@pytest.mark.parametrize("wishes", [
    {"in_process": True}, {"in_process": True, "mode": "inductive", "horizon": 2},
    {"how": "sigkill", "boundaries": ["after_update"], "expendable": ["run.counter"]}], ids=["clean", "cheap", "kill"])
def test_a_printed_command_gives_the_same_row_again(wishes: dict, tmp_path: Path) -> None:
    proof = prove_restart(LOST, steps=4, interrupt_at=[2], knock_out=False, resumes=1, progress_bar=False, **wishes)
    row = next(row for row in proof.rows if row.outcome == "different")
    again, before = pasted(command_for(proof, row, LOST), tmp_path), as_json(row)
    assert {name: again[name] for name in FEW} == {name: before[name] for name in FEW}
    assert again["divergence"] == before["divergence"]


@pytest.mark.parametrize("from_a_file", [True, False])
def test_a_printed_command_of_this_labs_loop_is_whole_too(from_a_file: bool, tmp_path: Path) -> None:
    config = ExperimentConfig(vocab_size=64, block_size=8, d_model=8, n_heads=2, n_layers=1, dropout=0.1, seed=5,
                              steps=4, batch_size=2, learning_rate=1e-2, checkpoint_every=2)
    (tmp_path / "it's mine.json").write_text(canonical_json(config.describe()))
    proof = prove_training(config, points=["sigkill@3:after_update"], knock_out=False, progress_bar=False)
    command = command_for(proof, proof.rows[1], Path("it's mine.json") if from_a_file else None)
    again, before = pasted(command, tmp_path), as_json(proof.rows[1])
    assert {name: again[name] for name in FEW} == {name: before[name] for name in FEW} and again["replayed"] == 1


@pytest.mark.parametrize("value", ["a text", "3", "true", "null", "[1]", 3, 0.5, True, None, [1, "b"], {"a": 1}, ""])
def test_an_argument_is_read_back_as_what_it_was(value: object, failed: Proof) -> None:
    command = command_for(failed, failed.rows[1], functools.partial(example_run, fault=value))
    words = shlex.split(command)
    assert argument_from(words[words.index("--with") + 1]) == ("fault", value)


def test_bars_lie_where_the_steps_were(failed: Proof) -> None:
    row = next(row for row in failed.rows if row.point == "clean@3")
    lane = lane_of(row)
    assert lane.bars == ((0.0, 3.0, False), (3.0, 2.0, True)) and lane.stops == (3.0,) and lane.differs
    replayed = replace(row, segments=((0, 4), (2, 5)), differing={}, divergence=None, outcome="equal")
    assert lane_of(replayed).bars == ((0.0, 4.0, False), (2.0, 3.0, False))
    assert row.divergence is not None
    found = replace(row.divergence, step=3, restoring=True)
    at_restore = replace(row, differing={3: ["x"], 4: ["x"]}, divergence=found)
    assert lane_of(at_restore).bars == ((0.0, 3.0, False), (3.0, 2.0, True))


def test_losses_that_are_not_finite_are_left_out_of_the_line() -> None:
    assert line_points({1: float("inf"), 2: 1.0, 4: 3.0}, 4, 1.0, 3.0) == "500.0,300.0 1000.0,0.0"


def test_the_map_is_in_order_of_computation(failed: Proof) -> None:
    told = difference_map(next(row for row in failed.rows if row.divergence))
    assert [path for path, _ in told[:3]] == ["loss", "model.0.weight", "model.0.bias"]
    assert told[0][1] == [2, 3, 4, 5]
