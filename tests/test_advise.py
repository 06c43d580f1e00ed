"""``relibra advise``: thresholds against values computed by hand, and a run on the recorded trace."""

import json

import numpy as np
import pytest

from relibra_jax.cli import advise
from relibra_jax.cli.main import main
from relibra_jax.contract.replay import check_replay
from relibra_jax.evaluation.advice import Advice, best_slots, fastest_point
from relibra_jax.evaluation.strategies import strategies
from relibra_jax.evaluation.thresholds import Point, route_some_evenly, threshold
from relibra_jax.traces.read import read_trace


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("three strategies", marks=pytest.mark.slow),
        pytest.param("all", marks=pytest.mark.long),
    ],
)
def advised(request, tmp_path_factory):
    """Return the JSON report and the files of a small run."""
    out = tmp_path_factory.mktemp("advise")
    options = ["--replica-slots", "1", "--resident-slots", "--micro-batches", "2", "--memory", "30"]

    def first_three(*args, **slots):
        return strategies(*args, **slots)[:3]

    with pytest.MonkeyPatch.context() as patch:
        if request.param != "all":
            patch.setattr(advise, "strategies", first_three)
        assert main(["advise", *options, "--out", str(out)]) == 0
    return json.loads((out / "advise.json").read_text()), sorted(path.name for path in out.iterdir())


def test_advise_names_the_fastest_that_fits(advised):
    report, files = advised
    assert files == ["advise.json", "advise.png"]
    fitting = [each for each in report["strategies"] if each["memory"] <= report["memory_limit"] == 30e9]
    best = min(fitting, key=lambda each: each["seconds"])
    slots = f", R={best['replica_slots']} B={best['resident_slots']}"
    assert report["best"] == best["name"] + slots * (best["replica_slots"] + best["resident_slots"] > 0)
    assert best["name"] != "nothing"


def test_advise_points_rise_and_the_last_is_the_setting(advised):
    report, _ = advised
    for name in ("tokens", "skew"):
        values = [point["at"] for point in report[name]]
        assert values == sorted(values)
    nothing = report["strategies"][0]
    gain = nothing["seconds"] / min(each["seconds"] for each in report["strategies"]) - 1
    assert report["tokens"][-1]["gain"] == pytest.approx(gain, rel=1e-4)
    assert report["skew"][-1]["gain"] == pytest.approx(gain, rel=1e-4), "no token routed evenly"
    assert report["skew"][-1]["at"] == pytest.approx(nothing["imbalance"])


def test_advise_prices_predictors_beside_the_strategies(advised):
    """The first predictor is the strategy that does nothing; what replay gives is the best strategy of the table."""
    report, _ = advised
    numbers = report["predictors"]
    assert [row["name"] for row in numbers["prices"]] == [
        "none",
        "the last batch",
        "a table by position",
        "a table by layer below",
        *(f"a network, {accuracy}%" for accuracy in (50, 70, 90)),
        "replay",
        "replay, best strategy",
    ]
    assert numbers["not_available"] == {"a table by token": "the trace has no token_ids"}
    assert numbers["replica_slots"] == 1
    for row in numbers["prices"]:
        assert row["seconds"] == pytest.approx(row["compute"] + row["communication"] + row["overhead"])
    none, last, *_, replay, best = numbers["prices"]
    nothing, *others = report["strategies"]
    assert none["seconds"] == pytest.approx(nothing["seconds"])
    (once,) = (each for each in others if (each["foresight"], each["replica_slots"]) == ("history", 1))
    assert last["seconds"] == pytest.approx(once["seconds"])
    known = [each for each in others if each["foresight"] != "history" and each["memory"] <= 30e9]
    fastest = min(known, key=lambda each: each["seconds"])
    assert numbers["best_with_replay"].startswith(fastest["name"])
    assert best["seconds"] == pytest.approx(fastest["seconds"] + replay["overhead"])
    assert best["gain"] == pytest.approx(none["seconds"] / best["seconds"] - 1)


def test_route_some_evenly_draws_a_token_in_all_layers_or_in_none():
    trace = read_trace(None)
    before, mask = np.asarray(trace.replay.expert_ids), np.asarray(trace.replay.mask)
    check_replay(route_some_evenly(trace, 0.5).replay, num_experts=trace.num_experts)
    kept = (np.asarray(route_some_evenly(trace, 0.5).replay.expert_ids) == before).all((2, 3))[mask]
    assert 0.4 < kept.mean() < 0.6, "a token is drawn in all layers, or in none"
    assert not route_some_evenly(trace, 0.0).synthetic
    even = np.asarray(route_some_evenly(trace, 1.0).replay.expert_ids)[mask]
    counts = np.bincount(even.ravel(), minlength=16)
    assert counts.max() / counts.mean() < 1.05


@pytest.mark.parametrize(
    ("gains", "start"),
    [
        ((0.02, 0.03, 0.04), 10.0),
        ((0.0, 0.02, 0.04), 10 * 10**0.5),
        ((0.02, 0.0, 0.01), 1000.0),
        ((0.02, 0.02, 0.0), None),
    ],
)
def test_threshold_is_where_every_point_from_there_on_pays(gains, start):
    points = [Point(at, gain, "") for at, gain in zip((10.0, 100.0, 1000.0), gains, strict=True)]
    assert threshold(points) == (start if start is None else pytest.approx(start))


@pytest.mark.parametrize(
    ("seconds", "best"), [((3.0, 4.0), (0.0, "nothing")), ((3.0, 2.0), (0.5, "reorder"))]
)
def test_fastest_point_counts_nothing_among_the_strategies(seconds, best):
    """A strategy that is slower than to do nothing is never the best one, and no gain is negative."""
    tried = strategies(replica_slots=(), resident_slots=())
    advice = [Advice(each, 1.0, time, 0.0, 1e9, 0.0) for each, time in zip(tried, seconds, strict=True)]
    assert fastest_point(advice, 64.0) == Point(64.0, *best)


def test_best_slots_take_least_time():
    tried = strategies(replica_slots=(1, 2, 0), resident_slots=(1,))
    labels = [f"{each.label} {each.foresight}" for each in tried]
    assert len(set(labels)) == len(labels) == 2 + 2 * 5 + 1 + 2 * 2
    advice = [Advice(each, 1.0, 5.0 - each.replica_slots, 0.0, 1e9, 0.0) for each in tried]
    chosen = best_slots(advice)
    assert chosen[0] is tried[0]
    assert len(chosen) == 10
    assert {each.replica_slots for each in chosen if "replicate" in each.name} == {2}


@pytest.mark.parametrize(
    ("options", "says"),
    {
        ("--cluster", "h10"): "cluster='h10' must be one of ",
        ("--memory", "1"): "memory=1.0 GB is too little: every strategy needs at least ",
        ("--memory", "-3"): "memory=-3.0 must be positive and finite",
        ("--nodes", "3"): "num_experts=16 must divide evenly over 12 ranks",
        ("--replica-slots", "40"): "replica_slots=40 must be at most num_experts=16",
    }.items(),
)
def test_advise_refuses_bad_input_in_one_line_and_writes_nothing(
    options, says, tmp_path, capsys, monkeypatch
):
    if options == ("--memory", "1"):  # this error comes only after strategies are priced
        monkeypatch.setattr(advise, "strategies", lambda *_, **__: [])
        monkeypatch.setattr(
            advise,
            "price",
            lambda *_, **__: [Advice(None, 1.0, 1.0, 0.0, 2e9, 0.0)],
        )
    assert main(["advise", *options, "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not (tmp_path / "out").exists()
