"""The pytest plugin, as a project of somebody else's meets it: in a pytest of its own."""

import subprocess
import sys
import textwrap

import pytest

pytest_plugins = ["pytester"]
PLUGIN = ("-p", "fault_tolerant_transformer_lab.pytest_plugin", "-p", "no:cacheprovider", "--color=no")
TRAINERS = """
    import functools
    from fault_tolerant_transformer_lab.equivalence import example_run

    sound = example_run
    lossy = functools.partial(example_run, fault="generator lost")
    unsteady = functools.partial(example_run, fault="not deterministic")
"""


def project(pytester, tests):
    "Write a project with a module of trainers, and run its tests with this interpreter."
    tests = "import pytest, trainers\n" + textwrap.dedent(tests)
    pytester.makepyfile(trainers=textwrap.dedent(TRAINERS), test_resume=tests)
    return lambda *words: pytester.runpytest_subprocess(*PLUGIN, *words)


def test_other_tests_do_not_pay_for_it(pytester):
    run = project(pytester, "")
    pytester.makepyfile(test_cheap="import sys\ndef test_cheap():\n    assert not {'torch', 'numpy'} & {*sys.modules}")
    run("test_cheap.py").assert_outcomes(passed=1)


def test_a_failure_is_the_diagnosis_and_a_command_that_shows_it_again(pytester):
    run = project(pytester, """
        def test_sound(restart_proof):
            assert restart_proof(trainers.sound, steps=3).verdict == "EQUIVALENT"

        @pytest.mark.restart_proof(steps=3)
        def test_lossy(restart_proof):
            restart_proof(trainers.lossy)

        def test_other():
            pass
    """)
    result = run("--restart-proof-quick", "--junitxml=report.xml")
    result.assert_outcomes(passed=2, failed=1)
    said = result.stdout.str()
    assert "generator" in said and "DIVERGENT" in said
    assert "tensor(" not in said and "Traceback" not in said and "prove_restart(" not in said
    result.stdout.fnmatch_lines(["*again: pytest test_resume.py::test_lossy --restart-proof-point *",
                                 "*= restart proofs =*", "test_resume.py::test_sound: EQUIVALENT, 3 steps, *",
                                 "test_resume.py::test_lossy: DIVERGENT, 3 steps, *"])
    assert "EQUIVALENT, 3 steps" in (pytester.path / "report.xml").read_text()
    point = said.partition("--restart-proof-point ")[2].split()[0].strip("'")
    again = run("test_resume.py::test_lossy", "--restart-proof-point", point)
    again.assert_outcomes(failed=1)
    assert "1 of 1 recovered runs" in again.stdout.str()


def test_it_works_under_xdist(pytester):
    run = project(pytester, """
        @pytest.mark.parametrize("name", ["sound", "lossy", "unsteady"])
        def test_resume(restart_proof, name):
            restart_proof(getattr(trainers, name), steps=3, how="clean")
    """)
    result = run("-n", "2", "--restart-proof-quick")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*operation: step 3, operation *bernoulli* in model.2, called at *"])
    result.stdout.fnmatch_lines(["*restart proofs*", "*[[]sound]: EQUIVALENT, 3 steps, *"])


def test_the_marker_chooses_the_proofs(pytester):
    run = project(pytester, """
        def test_proof(restart_proof):
            raise AssertionError("chosen")

        def test_other():
            pass
    """)
    run("-m", "not restart_proof", "--strict-markers").assert_outcomes(passed=1, deselected=1)
    run("-m", "restart_proof", "--strict-markers").assert_outcomes(failed=1, deselected=1)


def test_two_depths_at_once_are_refused(pytester):
    result = project(pytester, "")("--restart-proof-quick", "--restart-proof-full")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--restart-proof-quick and --restart-proof-full: expected one of them, got both*"])


def test_the_command_line_wins_over_the_test_and_the_test_over_the_marker(pytester):
    run = project(pytester, """
        @pytest.mark.restart_proof(steps=4, resumes=2, knock_out=True)
        def test_arguments(restart_proof, request):
            found = restart_proof.arguments({"steps": 5, "save_every": 2})
            assert (found["steps"], found["save_every"]) == (5, 2)
            if request.config.getoption("--restart-proof-full"):
                assert (found["resumes"], found["operations"], found["interrupt_at"]) == (3, "every", "every")
            elif request.config.getoption("--restart-proof-quick"):
                assert (found["resumes"], found["knock_out"], found["interrupt_at"]) == (1, False, [2])
            else:
                assert (found["resumes"], found["knock_out"]) == (2, True)
                assert "interrupt_at" not in found
    """)
    for words in ([], ["--restart-proof-quick"], ["--restart-proof-full"]):
        run(*words).assert_outcomes(passed=1)


def test_importing_the_plugin_imports_no_torch():
    code = "import sys, fault_tolerant_transformer_lab.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
