"The goodput model: closed forms by hand, limits and monotony for any numbers, the simulation against them, refusals."

import itertools
import json
import math
import os
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fault_tolerant_transformer_lab.config import ConfigError
from fault_tolerant_transformer_lab.goodput import (
    Costs,
    FailureLaw,
    ShardedSave,
    availability_interval,
    costs_of_account,
    costs_of_benchmark,
    daly_first_interval,
    daly_interval,
    describe_plan,
    expected_shares,
    period_of,
    plan,
    plan_from,
    plan_of_account,
    renewal_goodput,
    simulate,
    simulate_attempts,
    simulate_runs,
    tolerable_intervals,
    young_interval,
)
from fault_tolerant_transformer_lab.interval import (
    DEFAULT_PRIOR_MTBF,
    PlanError,
    auto_interval,
    estimated_mtbf,
    optimal_interval,
    step_seconds_of,
)
from fault_tolerant_transformer_lab.ledger import PHASES, Account, Attempt, Ledger

SECONDS = st.floats(0, 1e4)
POSITIVE = st.floats(0.01, 1e6)
COSTS = st.builds(Costs, stall=SECONDS, commit_delay=SECONDS, detection=SECONDS, restart=SECONDS, restore=SECONDS)


def goodput(costs, mtbf, interval):
    return expected_shares(costs, mtbf, interval)["useful"]


# -- closed forms ------------------------------------------------------------------------------------------------------


def test_the_published_optima_of_daly():
    "J. T. Daly 2006, captions of figures 3 to 5: 117, 57 and 9.1 minutes for a dump of 5 minutes."
    assert round(daly_interval(5, 24 * 60)) == 117
    assert round(daly_interval(5, 6 * 60)) == 57
    assert round(daly_interval(5, 15), 1) == 9.1


def test_formulas_by_hand():
    assert young_interval(2, 100) == 20  # sqrt(400)
    assert daly_first_interval(2, 75, 25) == 20
    assert daly_interval(200, 100) == daly_interval(1e9, 100) == 100  # saves of twice the MTBF and more
    assert math.isclose(daly_interval(2, 100), 20 * (1 + 0.1 / 3 + 0.01 / 9) - 2)
    assert availability_interval(2, 90, 9) == 20  # sqrt(2 * 2 * 99 + 4)
    assert math.isclose(optimal_interval(1 - math.log(2), 1.0) + math.log(2), 1.0, abs_tol=0.4)  # order of the MTBF
    x = 0.25  # 1 - x = exp(-x - s) gives s = -log(1 - x) - x
    assert math.isclose(optimal_interval(-math.log(1 - x) - x, 1.0), x, rel_tol=1e-12)


def test_availability_interval_maximises_the_availability():
    def availability(tau, stall=60.0, mtbf=7_200.0, recovery=900.0):
        period = tau + stall
        return (1 - stall / period) * mtbf / (mtbf + recovery + period / 2)

    best = availability_interval(60, 7_200, 900)
    assert availability(best) > max(availability(0.999 * best), availability(1.001 * best))


def test_shares_by_hand():
    ln2 = math.log(2)
    costs = Costs(stall=0.0, restart=100 * ln2)  # half of all attempts die while they restart
    shares = expected_shares(costs, 100.0, 100 * ln2)  # and of the others, half before the first save
    assert math.isclose(shares["useful"], ln2 * 0.5)  # 1/4 + 1/8 + ... saves an attempt, each 100 ln 2 s, of 100 s
    assert math.isclose(shares["waiting"], 0.5) and math.isclose(shares["replayed"], 0.5 - ln2 / 2)
    with_detection = expected_shares(replace(costs, detection=100.0), 100.0, 100 * ln2)
    assert math.isclose(with_detection["useful"], shares["useful"] / 2)
    delayed = expected_shares(replace(costs, commit_delay=100 * ln2), 100.0, 100 * ln2)  # each save needs twice as long
    assert math.isclose(delayed["useful"], shares["useful"] / 2)


# -- any numbers -------------------------------------------------------------------------------------------------------


@given(COSTS, POSITIVE, POSITIVE)
def test_shares_are_shares(costs, mtbf, interval):
    shares = expected_shares(costs, mtbf, interval)
    assert tuple(shares) == PHASES and all(0 <= share <= 1 for share in shares.values())
    assert math.isclose(math.fsum(shares.values()), 1.0, abs_tol=1e-6)


@given(COSTS, POSITIVE, POSITIVE, st.sampled_from(list(asdict(Costs(stall=0)))), st.floats(1.01, 10))
def test_no_cost_that_grows_gains_anything(costs, mtbf, interval, name, factor):
    worse = replace(costs, **{name: getattr(costs, name) * factor + 0.1})
    assert goodput(worse, mtbf, interval) <= goodput(costs, mtbf, interval) * (1 + 1e-9)


@given(COSTS, POSITIVE, POSITIVE, st.floats(1.01, 10))
def test_fewer_failures_gain_whatever_the_interval(costs, mtbf, interval, factor):
    assert goodput(costs, mtbf * factor, interval) >= goodput(costs, mtbf, interval) * (1 - 1e-9)


@given(COSTS, POSITIVE, POSITIVE)
def test_without_failures_only_stalls_are_lost(costs, mtbf, interval):
    shares = expected_shares(costs, 1e15, interval)
    assert math.isclose(shares["useful"], interval / period_of(costs, interval), abs_tol=1e-4)


@given(st.floats(1e-6, 1e5), st.floats(1e-2, 1e8), COSTS, st.floats(0.01, 100))
def test_no_interval_is_better_than_the_optimum(stall, mtbf, costs, factor):
    costs = replace(costs, stall=stall)
    best = optimal_interval(stall, mtbf, costs.commit_delay)
    assert min(costs.commit_delay, mtbf) <= best <= mtbf and best > 0
    assert goodput(costs, mtbf, best * factor) <= goodput(costs, mtbf, best) * (1 + 1e-9)


@given(st.floats(1e-6, 1e4), st.floats(1.0, 1e8), st.floats(1.1, 10))
def test_the_optimum_grows_with_the_save_and_with_the_mtbf(stall, mtbf, factor):
    assert optimal_interval(stall * factor, mtbf) >= optimal_interval(stall, mtbf)
    assert optimal_interval(stall, mtbf * factor) >= optimal_interval(stall, mtbf)


@given(st.floats(1e-3, 1e3), st.floats(1e-9, 1e-5))
def test_all_formulas_are_one_in_the_limit_of_rare_failures(stall, ratio):
    mtbf = stall / ratio
    exact = optimal_interval(stall, mtbf)
    for other in (young_interval(stall, mtbf), daly_interval(stall, mtbf), daly_first_interval(stall, mtbf, stall),
                  availability_interval(stall, mtbf, stall)):
        assert math.isclose(exact, other, rel_tol=4 * math.sqrt(ratio))


@given(st.floats(1e-2, 1e3), st.floats(0.05, 1.99))
def test_daly_is_near_the_optimum_up_to_saves_of_twice_the_mtbf(stall, ratio):
    mtbf = stall / ratio
    at_daly, at_best = (goodput(Costs(stall=stall), mtbf, f(stall, mtbf)) for f in (daly_interval, optimal_interval))
    assert at_daly >= 0.995 * at_best


@given(COSTS, st.floats(1.0, 1e6), st.floats(1e-3, 1e6))
def test_the_sum_over_saves_is_the_formula_where_there_is_no_memory(costs, mtbf, interval):
    assume(mtbf / period_of(costs, interval) < 1e4)
    assert math.isclose(renewal_goodput(costs, FailureLaw(mtbf), interval), goodput(costs, mtbf, interval),
                        rel_tol=1e-6, abs_tol=1e-12)


# -- the simulation ----------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.builds(Costs, stall=st.floats(0, 50), commit_delay=st.floats(0, 300), detection=st.floats(0, 50),
                 restart=st.floats(0, 50), restore=st.floats(0, 50)),
       st.floats(50, 2_000), st.floats(20, 1_000))
def test_simulation_and_formula_agree_for_any_numbers(costs, mtbf, interval):
    assume(period_of(costs, interval) + costs.commit_delay + costs.recovery < 3 * mtbf)  # saves that hundreds live to
    run = simulate(costs, FailureLaw(mtbf), interval, n=3_000, seed=11)
    expected = expected_shares(costs, mtbf, interval)
    for name in PHASES:  # 1.5 times the 99.9 % interval: hundreds of comparisons must not fail by chance
        assert abs(run.shares[name] - expected[name]) <= 1.5 * run.margins[name] + 1e-3


@pytest.mark.parametrize("shape", [0.5, 0.7, 1.5, 3.0])
def test_simulation_and_sum_agree_for_failures_with_a_memory(shape):
    costs, law = Costs(stall=20, commit_delay=90, detection=60, restart=120, restore=30), FailureLaw(1_800, shape)
    run = simulate(costs, law, 200.0, n=20_000, seed=12)
    assert abs(run.goodput - renewal_goodput(costs, law, 200.0)) <= run.margins["useful"]
    assert abs(run.goodput - goodput(costs, 1_800, 200.0)) > run.margins["useful"]  # the memory shows


@pytest.mark.parametrize("shape", [0.3, 1.0, 2.0])
def test_the_law_has_the_mean_that_it_was_given(shape):
    law = FailureLaw(100.0, shape)
    drawn = law.draw(np.random.default_rng(0), 200_000)
    assert abs(drawn.mean() - 100) < 4 * drawn.std() / math.sqrt(200_000)
    for t in (1.0, 50.0, 300.0):
        assert abs((drawn > t).mean() - law.survival(np.array([t]))[0]) < 0.006


def test_attempts_account_for_every_second_and_saves_for_whole_intervals():
    costs, law = Costs(stall=3, commit_delay=11, detection=7, restart=5, restore=2), FailureLaw(100)
    spent = simulate_attempts(costs, law, 8.0, 2_000, np.random.default_rng(1))
    lives = law.draw(np.random.default_rng(1), 2_000)
    assert np.allclose(sum(spent.values()), lives + 7)
    assert np.allclose(spent["useful"] % 8.0, 0, atol=1e-9) and min(values.min() for values in spent.values()) > -1e-9


def test_the_margin_holds_the_truth_as_often_as_it_says():
    costs, inside = Costs(stall=20, restart=60), 0
    truth = goodput(costs, 600, 150)
    for seed in range(200):
        run = simulate(costs, FailureLaw(600), 150, n=400, seed=seed)
        inside += abs(run.goodput - truth) <= run.margins["useful"] * 1.96 / 3.29
    assert 180 <= inside <= 199  # of 200 intervals of 95 %: 190, give or take


def test_the_same_seed_is_the_same_run():
    costs = Costs(stall=20, restart=60)
    assert simulate(costs, FailureLaw(600), 150, n=100, seed=3) == simulate(costs, FailureLaw(600), 150, n=100, seed=3)
    assert simulate(costs, FailureLaw(600), 150, n=100, seed=3) != simulate(costs, FailureLaw(600), 150, n=100, seed=4)


def test_runs_of_a_fixed_length_have_as_many_failures_as_they_should():
    costs = Costs(stall=5, detection=100, restart=60)
    failures, share = simulate_runs(costs, FailureLaw(900), 100, seconds=200_000, n_runs=400, seed=0)
    assert abs(failures.mean() - 200) < 4 * math.sqrt(200 / 400) + 1  # one in 1,000 s
    assert abs(share.mean() - goodput(costs, 900, 100)) < 0.005


def test_the_record_of_llama_3():
    "419 unexpected interruptions of 16,384 GPUs in 54 days, over 90 % effective (arXiv 2407.21783, 3.3.4)."
    day = 86_400.0
    save = 405e9 * 14 / 2e12
    costs = Costs(stall=save, detection=120, restart=480, restore=save)
    mtbf = 54 * day / 419 - 120
    failures, share = simulate_runs(costs, FailureLaw(mtbf), optimal_interval(save, mtbf), seconds=54 * day, n_runs=100,
                                    seed=0)
    assert np.percentile(failures, 2.5) < 419 < np.percentile(failures, 97.5)
    assert share.min() > 0.90


# -- sharded saves -----------------------------------------------------------------------------------------------------

SHARDED = ShardedSave(state_bytes=8e12, shards=1_000, rank_bandwidth=1e9, storage_bandwidth=4e12)


def test_sharded_save_by_hand():
    assert SHARDED.transfer_seconds(1_000) == 8.0  # 8 GB by one rank; 8 TB by 4 TB/s would be 2 s
    assert replace(SHARDED, rank_bandwidth=1e10).transfer_seconds(1_000) == 2.0
    assert SHARDED.transfer_seconds(4_000) == 8.0 and SHARDED.transfer_seconds(8_000) == 16.0  # replicas read too
    assert replace(SHARDED, readers=8_000).costs().restore == 16.0
    assert math.isclose(SHARDED.costs().stall, 0.4)  # 8 GB to the host by 20 GB/s
    assert math.isclose(SHARDED.agreement_seconds(), 2 * (1e-3 + 32 * 20e-6))  # 1000, 32, 1
    assert math.isclose(replace(SHARDED, fan_in=10).agreement_seconds(), 3 * (1e-3 + 10 * 20e-6))
    synchronous = replace(SHARDED, asynchronous=False).costs(detection=3, restart=4)
    assert synchronous == Costs(stall=8.0 + SHARDED.agreement_seconds(), detection=3, restart=4, restore=8.0)


@given(st.integers(1, 10**6), st.integers(2, 10**6))
def test_agreement_reaches_every_rank(shards, fan_in):
    seconds = replace(SHARDED, shards=shards, fan_in=fan_in, hop_seconds=1.0, message_seconds=0.0).agreement_seconds()
    levels = round(seconds)
    assert fan_in**levels >= shards and (levels == 0 or fan_in ** (levels - 1) < shards)


@given(st.integers(1, 10**6), st.floats(1.1, 100))
def test_more_bandwidth_is_never_slower(shards, factor):
    save = replace(SHARDED, shards=shards)
    for name in ("rank_bandwidth", "storage_bandwidth"):
        faster = replace(save, **{name: getattr(save, name) * factor})
        assert faster.transfer_seconds(shards) <= save.transfer_seconds(shards)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, -math.inf, "5", None, True])
@pytest.mark.parametrize("name", list(asdict(Costs(stall=0))))
def test_costs_refuse(name, wrong):
    with pytest.raises(PlanError, match=f"^{name}: expected a finite number of at least 0, got .*; give"):
        Costs(**({"stall": 1.0} | {name: wrong}))


@pytest.mark.parametrize("call", [
    lambda: plan(Costs(stall=1), 0.0), lambda: plan(Costs(stall=1), math.inf), lambda: plan(Costs(stall=1), math.nan),
    lambda: plan(Costs(stall=1), 10.0, step_seconds=0.0), lambda: plan(Costs(stall=1), 10.0, interval=-1.0),
    lambda: expected_shares(Costs(stall=1), 10.0, 0.0), lambda: simulate(Costs(stall=1), FailureLaw(10.0), 0.0),
    lambda: FailureLaw(0.0), lambda: FailureLaw(1.0, shape=0.0), lambda: FailureLaw(1.0, shape=math.nan),
    lambda: optimal_interval(-1.0, 10.0), lambda: estimated_mtbf(Account(()), prior=0.0),
    lambda: renewal_goodput(Costs(stall=0), FailureLaw(1e9), 1e-3),
    lambda: ShardedSave(state_bytes=1, shards=True, rank_bandwidth=1, storage_bandwidth=1),
    lambda: replace(SHARDED, fan_in=1), lambda: replace(SHARDED, storage_bandwidth=-1.0),
    lambda: plan(Costs(stall=1), 10.0, interval=0.0), lambda: plan(Costs(stall=1), 10.0, interval=1e300),
    lambda: plan(Costs(stall=1), 1e-300), lambda: plan(Costs(stall=1), 1e300), lambda: Costs(stall=1e300),
    lambda: plan(Costs(stall=1), 10.0, step_seconds=1e-300), lambda: plan(Costs(stall=1), 10.0, step_seconds=1e300),
    lambda: replace(SHARDED, state_bytes=1e308).costs(), lambda: replace(SHARDED, rank_bandwidth=1e-308).costs(),
])
def test_every_refusal_says_what_was_expected_and_what_arrived(call):
    with pytest.raises(PlanError, match=r"expected .* got ") as refusal:
        call()
    assert ";" in str(refusal.value) and "\n" not in str(refusal.value)
    assert isinstance(refusal.value, ConfigError)  # exit status 2 on the command line


@pytest.mark.parametrize("stall", [0.0, 5e-324, 1e-300, 1e-9, 1.0, 1e12])
@pytest.mark.parametrize("mtbf", [1e-9, 1.0, 1e12])
def test_a_plan_at_the_ends_of_what_is_accepted(stall, mtbf):
    for others, step, interval in itertools.product((0.0, 5e-324, 1e12), (None, 1e-9, 1e12), (None, 1e-9, 1e12)):
        costs = Costs(stall=stall, commit_delay=others, detection=others, restart=others, restore=others)
        made = plan(costs, mtbf, step_seconds=step, interval=interval)
        shares = json.loads(json.dumps(made.to_plain(), allow_nan=False))["shares"]
        assert all(0 <= share <= 1 for share in shares.values()) and math.isclose(math.fsum(shares.values()), 1)
        assert "nan" not in describe_plan(made) and "inf" not in describe_plan(made)


def test_a_message_names_what_was_given():
    with pytest.raises(PlanError, match=r"^mtbf: expected a finite number of at least 1e-09, got 1e-300; give"):
        plan(Costs(stall=1.0), 1e-300)
    with pytest.raises(PlanError, match=r"^stall: expected at most 1e\+12 seconds, got 1e\+300; give"):
        Costs(stall=1e300)
    with pytest.raises(PlanError, match=r"^state_bytes: expected a save .* got inf; check the bytes, the bandwidths"):
        replace(SHARDED, rank_bandwidth=1e-308).costs()


def test_a_file_that_is_no_benchmark(tmp_path):
    os.mkfifo(tmp_path / "fifo.json")  # would be waited for
    with pytest.raises(PlanError, match="fifo.json: expected a result of"):
        costs_of_benchmark(tmp_path / "fifo.json")
    with pytest.raises(PlanError, match="no.json: expected a result of benchmarks/checkpoint_cost.py, got File"):
        costs_of_benchmark(tmp_path / "no.json")
    for text in ("", "[]", "{}", '{"about": {"state_bytes": "many"}}', "[" * 100_000,
                 f'{{"about": {{"state_bytes": 1{"0" * 400}}}}}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(PlanError, match="expected a result of"):
            costs_of_benchmark(tmp_path / "other.json")


# -- plans -------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(COSTS, st.floats(1.0, 1e7), st.none() | st.floats(1e-3, 1e4), st.none() | st.floats(1e-2, 1e6))
def test_any_plan_can_be_written_and_is_whole(costs, mtbf, step, interval):
    made = plan(costs, mtbf, step_seconds=step, interval=interval)
    plain = json.loads(json.dumps(made.to_plain(), allow_nan=False))
    assert plain["goodput"] <= plain["best_goodput"] * (1 + 1e-6) + (0.02 if step else 1e-9)
    assert made.steps is None if step is None else made.steps >= 1 and made.interval == made.steps * step
    text = describe_plan(made)
    assert " -0" not in text and "e-" not in text
    assert text.startswith("save every ") and all(name in text for name in PHASES) and "nan" not in text
    assert made.tolerable[0] <= made.optimal <= made.tolerable[1] * (1 + 1e-9)


def test_a_plan_in_words():
    made = plan(Costs(stall=6, detection=30, restart=200, restore=10), 7_170.0, step_seconds=1.5)
    lines = describe_plan(made).splitlines()
    # Young: sqrt(2 * 6 * 7170) = 293 s, the exact one a little less; to first order 1 - 6/296 - 388/7200 = 92.6 %
    assert lines[0] == "save every 4 min 50 s (193 steps): expected goodput 92.8%"
    assert "one in 2 h 00 min" in lines[2] and made.notes == ()
    assert math.isclose(made.to_plain()["failures_per_day"], 12.0)
    lost = made.to_plain()["lost_seconds_per_failure"]
    assert lost["waiting"] == pytest.approx(230, abs=10) and lost["restoring"] == pytest.approx(10, abs=1)


def test_notes_say_what_is_wrong():
    assert "more than half of the time is lost" in " ".join(plan(Costs(stall=900), 900.0).notes)
    assert "saves wait for each other" in plan(Costs(stall=1, commit_delay=60), 1e5, interval=10.0).notes[0]
    assert "the background write (50 min 00 s) sets" in plan(Costs(stall=1, commit_delay=3_000), 1e5).notes[0]
    assert "a save costs nothing" in plan(Costs(stall=0), 1e5).notes[0]
    assert "21% of the time between failures" in plan(Costs(stall=1, restart=210), 1e3).notes[0]


def test_what_cannot_be_chosen_is_not_called_the_best():
    slow = plan(Costs(stall=5), 100.0, step_seconds=60.0)
    assert (slow.steps, slow.optimal, slow.goodput) == (1, 60.0, slow.best_goodput)
    assert slow.notes[-1].startswith("a step takes 60.0 s, longer than the best interval (28.4 s)")
    rare = plan(Costs(stall=1e-5), 1e8)  # the best is less than a millionth of the time between failures
    assert rare.interval == rare.optimal == optimal_interval(1e-5, 1e8) < 50
    asked = plan(Costs(stall=1e-5), 1e8, interval=1.0)
    assert asked.interval == 1.0 and "the best would be 44.7 s" in describe_plan(asked)
    for made in (slow, rare, plan(Costs(stall=0), 1e5)):
        assert "the best would be" not in describe_plan(made)


def test_tolerable_intervals_are_half_a_point_from_the_best():
    costs = Costs(stall=10, restart=60)
    best = optimal_interval(10, 7_200)
    short, long = tolerable_intervals(costs, 7_200, best)
    for edge in (short, long):
        assert math.isclose(goodput(costs, 7_200, best) - goodput(costs, 7_200, edge), 0.005, abs_tol=1e-9)
    assert short < best < long


# -- from a run's ledger -----------------------------------------------------------------------------------------------


def attempt(number, began, at, *, useful, stalled=0.0, waiting=0.0, steps=0, saves=0, end="running"):
    seconds = dict.fromkeys(PHASES, 0.0) | {"useful": useful, "stalled": stalled, "waiting": waiting}
    return Attempt(number, began, at, steps, steps, seconds, {"useful": steps, "replayed": 0},
                   dict.fromkeys(PHASES, 0) | {"stalled": saves}, end)


def test_a_stop_for_the_night_is_no_recovery():
    account = Account((
        attempt(1, 0.0, 110.0, useful=100, stalled=10, steps=50, saves=5),  # killed
        attempt(2, 140.0, 250.0, useful=100, stalled=10, steps=50, saves=5, end="stopped"),
        attempt(3, 50_000.0, 50_110.0, useful=95, stalled=10, waiting=5.0, steps=50, saves=5),  # killed
        attempt(4, 50_120.0, 50_130.0, useful=10, steps=5, end="finished")))
    costs = costs_of_account(account)
    assert costs == Costs(stall=2.0, restart=20.0)  # the median of 30 and 10 s
    assert account.failures == 2 and step_seconds_of(account) == 305 / 155
    assert math.isclose(estimated_mtbf(account, prior=1_000.0), (1_000 * 170 * 170) ** (1 / 3))  # 340 s, two failures
    assert estimated_mtbf(account, prior=100.0) == (100 + 340) / 3  # not worse than was believed
    made = plan_of_account(account, prior_mtbf=1_000.0)
    assert made.costs == costs and made.mtbf == estimated_mtbf(account, prior=1_000.0)
    assert made.steps == round(made.optimal / (305 / 155))


def test_a_plan_says_what_it_does_not_know():
    account = Account((
        attempt(1, 0.0, 110.0, useful=100, stalled=10, steps=50, saves=5),  # killed
        attempt(2, 140.0, 250.0, useful=100, stalled=10, steps=50, saves=5, end="finished")))
    made = plan_of_account(account, prior_mtbf=3_600.0)
    assert [note for note in made.notes if "is an estimate from 1 failure in 3 min 40 s and from one in 60 min" in note]
    assert not [note for note in plan_of_account(account, mtbf=100.0).notes if "estimate" in note]
    assert not [note for note in made.notes if "add up" in note]
    suspended = Account((attempt(1, 0.0, 210.0, useful=100, stalled=10, steps=50, saves=5, end="finished"),))
    assert [note for note in plan_of_account(suspended, mtbf=100.0).notes
            if "does not add up: 1 min 40 s belong to no phase" in note]


def test_a_plan_from_whatever_is_known(tmp_path):
    clock = iter(range(10**6)).__next__  # a second passes with every look at it
    with Ledger(tmp_path / "ledger.jsonl", clock=lambda: float(clock()), calendar=lambda: float(clock())) as ledger:
        ledger.open(0)
        for step in (1, 2, 3):
            with ledger.step(step):
                pass
        account = ledger.account()
        with pytest.raises(PlanError, match="at least one save, got none"):
            plan_from(tmp_path, mtbf=100.0)
        early = plan_from(tmp_path, given={"stall": 2.0}, mtbf=100.0)  # not saved yet: the stall was given
        assert early.costs == Costs(stall=2.0)
        assert early.steps == max(1, round(early.optimal / step_seconds_of(account)))
        with ledger.phase("stalled"):
            pass
    own = plan_from(tmp_path)
    assert own.costs.stall > 0 and own == plan_from(tmp_path / "ledger.jsonl")
    assert any("is an estimate from 0 failures" in note for note in own.notes)
    assert not any("estimate" in note for note in plan_from(tmp_path, mtbf=100.0).notes)
    assert plan_from(tmp_path, given={"restart": 77.0}).costs == replace(own.costs, restart=77.0)
    assert plan_from(tmp_path, mtbf=500.0).mtbf == plan_from(tmp_path, accelerators=2, accelerator_mtbf=1e3).mtbf == 500
    assert plan_from(tmp_path, sharded=SHARDED).costs == SHARDED.costs()
    assert plan_from(given={"stall": 3.0}, mtbf=60.0) == plan(Costs(stall=3.0), 60.0)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "ledger.jsonl").write_bytes(b"no ledger\n\0\0\0\n")
    (tmp_path / "folder" / "ledger.jsonl").mkdir(parents=True)
    for wrong, message in ((dict(path=tmp_path / "no", mtbf=1.0), "^no: expected a run's folder"),
                           (dict(mtbf=1.0), "^stall: expected"),
                           (dict(path=tmp_path / "damaged"), "^damaged: expected a run's ledger, found 2 lines, not"),
                           (dict(path=tmp_path / "folder"), "^folder: expected a run's folder"),
                           (dict(path="/"), "^/: expected a run's folder"),
                           (dict(path=tmp_path, state_bytes=1e9), "^state_bytes: expected with a benchmark's JSON"),
                           (dict(given={"stall": 1}, mtbf=1.0, state_bytes=1e9), "^state_bytes: expected with"),
                           (dict(given={"stall": 1}), "^mtbf: expected"),
                           (dict(given={"stall": 1}, accelerators=0), "^accelerators: expected"),
                           (dict(given={"stall": 1}, accelerators=1, accelerator_mtbf=0.0), "^accelerator_mtbf: exp")):
        with pytest.raises(PlanError, match=message):
            plan_from(**wrong)


@given(st.integers(0, 50), st.floats(0, 1e7))
def test_the_estimate_moves_from_the_prior_to_what_was_seen(failures, hours):
    attempts = tuple(attempt(i + 1, 0.0, 0.0, useful=0.0) for i in range(failures))
    account = Account((*attempts, attempt(failures + 1, 0.0, hours, useful=hours)))
    estimate = estimated_mtbf(account)
    arithmetic = (DEFAULT_PRIOR_MTBF + hours) / (1 + failures)
    if failures == 0 or hours / failures > DEFAULT_PRIOR_MTBF:
        assert math.isclose(estimate, arithmetic)
    else:
        assert 0 < estimate <= arithmetic * (1 + 1e-9) and estimate <= DEFAULT_PRIOR_MTBF
        assert estimate >= min(DEFAULT_PRIOR_MTBF, hours / failures) * (1 - 1e-9)
    if failures:  # one failure fewer in the same time is better
        assert estimate < estimated_mtbf(Account(account.attempts[1:]))


def test_a_run_that_fails_every_few_seconds_is_soon_believed():
    attempts = tuple(attempt(i + 1, 10.0 * i, 10.0 * i + 3, useful=3.0, steps=30, saves=1, stalled=0.1)
                     for i in range(7))
    assert estimated_mtbf(Account(attempts)) < 15  # six failures in 21 s, against a prior of one in a day
    assert auto_interval(Account(attempts)).seconds < 2


def run_of(n_steps, stall, step=0.1, saves=10, end="running"):
    return Account((attempt(1, 0.0, n_steps * step + saves * stall, useful=n_steps * step, stalled=saves * stall,
                            steps=n_steps, saves=saves, end=end),))


def test_auto_begins_at_one_step_and_at_most_doubles():
    assert auto_interval(Account(())).steps == 1 and auto_interval(Account(())).stall is None
    assert auto_interval(run_of(100, 0.5, saves=0)).steps == 1  # steps but no save: still nothing to go by
    account = run_of(1_000, 0.5)
    best = auto_interval(account, current=10**6).steps
    assert best == round(optimal_interval(0.5, estimated_mtbf(account)) / 0.1)
    current = 1
    for expected in (2, 4, 8, 16):
        current = auto_interval(account, current=current).steps
        assert current == expected
    assert auto_interval(account, current=round(best * 1.15)).steps == round(best * 1.15)  # near enough: it stays
    assert auto_interval(account, current=2 * best).steps == best  # down at once
    assert auto_interval(account, current=best, at_most=7).steps == 7
    assert "stays at" in auto_interval(account, current=best).reason
    assert auto_interval(account).steps == best  # an attempt with ten saves behind it does not begin again at one
    assert auto_interval(run_of(1_000, 0.5, saves=4)).steps == 2


@given(st.integers(1, 10**6), st.floats(0, 1e3), st.floats(1e-6, 1e3), st.integers(1, 10**6),
       st.none() | st.integers(1, 10**4))
def test_auto_is_a_number_of_steps_whatever_was_measured(n_steps, stall, step, current, at_most):
    answer = auto_interval(run_of(n_steps, stall, step), current=current, at_most=at_most)
    assert type(answer.steps) is int and 1 <= answer.steps <= 2 * current
    assert at_most is None or answer.steps <= at_most
    assert answer == auto_interval(run_of(n_steps, stall, step), current=current, at_most=at_most)


def test_auto_saves_more_often_where_saving_is_cheap_or_failures_are_many():
    usual = auto_interval(run_of(1_000, 0.5), current=10**6).steps
    assert auto_interval(run_of(1_000, 0.05), current=10**6).steps < usual
    assert auto_interval(run_of(1_000, 0.5), current=10**6, prior_mtbf=600.0).steps < usual
    assert auto_interval(run_of(1_000, 0.5), current=10**6, commit_delay=5_000.0).steps == 50_000  # by the write
