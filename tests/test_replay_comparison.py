"""``python -m experiments.replay_comparison``: what is compared, the summary of metrics, and resuming."""

import dataclasses
import json

import numpy as np
import pytest
from support.compared import fake_runs

from experiments import compared_runs
from experiments.replay_comparison import (
    COMPARED,
    SHARED,
    ReplayComparison,
    average,
    main,
    summarise,
    variant_config,
)
from experiments.rl.metrics import METRICS


def learned(mismatch, *, live):
    """Make the line of a learning step, with the mismatch as its mean, and metrics that follow from it."""
    return {
        "kind": "learn",
        "step": 0,
        "mismatch/log_prob": mismatch,
        "mismatch/log_prob_quantiles": [mismatch / 2, mismatch, 3 * mismatch, 9 * mismatch],
        "routing/changed_share": mismatch / 10,
        "policy/clipped_share": 0.25,
        "policy/kl": None if mismatch > 1 else mismatch,
        "policy/skipped": 4 if mismatch > 1 else 0,
        "balance/imbalance": 1.0,
        "balance/imbalance_live": 1.5 if live else None,
        "balance/imbalance_recompute": 1.75 if live else None,
        "balance/imbalance_static": 2.0,
        "time/modelled_plan_seconds": 0.5,
        "time/modelled_staying_seconds": 0.75,
        "time/step_seconds": mismatch,
    }


def lines_of(*, live, rewards=(0.25, 0.5)):
    first, last = ({"kind": "evaluation", "step": 0, "evaluation/reward": reward} for reward in rewards)
    steps = [learned(mismatch, live=live) for mismatch in (0.125, 0.375, 2.0)]
    return [{"kind": "warm-up", "step": 0}, first, *steps, last]


def test_variants_differ_only_in_what_they_learn_from():
    comparison = ReplayComparison(steps=3)
    configs = {variant: variant_config(variant, comparison) for variant in COMPARED}
    assert {variant: (config.replay, config.routing) for variant, config in configs.items()} == {
        "R3": (True, "rollout"),
        "R2": (True, "recompute"),
        "live, TIS": (False, "rollout"),
        "live, GSPO": (False, "rollout"),
    }
    names = ("replay", "routing", "correction", "loss", "token_weights", "clip", "out")
    same = {name: getattr(configs["R3"], name) for name in names}
    assert all(dataclasses.replace(config, **same) == configs["R3"] for config in configs.values())
    assert len({config.out for config in configs.values()}) == len(COMPARED)
    assert configs["live, TIS"].correction.kind == "truncate"
    assert configs["live, GSPO"].loss == "gspo"
    assert configs["R3"].rollout_dtype == "bfloat16" != configs["R3"].dtype


@pytest.mark.parametrize("live", [False, True])
def test_summarise_averages_what_ran(live):
    assert learned(1.0, live=live).keys() - {"kind", "step"} <= METRICS.keys()
    summary = summarise(lines_of(live=live), dataclasses.replace(SHARED, replay=not live))
    assert (summary["reward_start"], summary["reward_end"]) == (0.25, 0.5)
    assert summary["mismatch"] == pytest.approx(2.5 / 3)
    assert (summary["mismatch_99"], summary["mismatch_largest"]) == (pytest.approx(2.5), 18.0)
    assert summary["routing_changed"] == pytest.approx(0.25 / 3)
    assert (summary["kl"], summary["skipped"]) == (0.25, 4)
    assert summary["step_seconds"] == 0.375
    expected = (1.5, 1.75, 750) if live else (1.0, 1.0, 500)
    assert (
        tuple(summary[name] for name in ("imbalance", "imbalance_recompute", "modelled_milliseconds"))
        == expected
    )


def test_average_gives_standard_errors_over_seeds():
    values = np.array([0.5, 0.75, 0.7])
    [(name, numbers)] = average([{"reward_end": value} for value in values]).items()
    assert name == "reward_end"
    assert numbers["mean"] == pytest.approx(values.mean())
    error = np.sqrt(sum((value - values.mean()) ** 2 for value in values) / 2 / 3)
    assert numbers["error"] == pytest.approx(error)
    assert average([{"curve": [0.5, 1.0]}]) == {"curve": {"mean": [0.5, 1.0], "error": None}}


def test_main_neither_repeats_nor_mixes_runs(tmp_path, monkeypatch, capsys):
    run_train, started_runs = fake_runs(lambda config: lines_of(live=not config.replay))
    monkeypatch.setattr(compared_runs, "run_train", run_train)
    config = ReplayComparison(out=tmp_path, seeds=(0, 1), steps=3)
    main(config)
    assert not (tmp_path / "replay_comparison.json").exists(), "the second variant was stopped"
    (tmp_path / "r2" / "summary.json").write_text("{}")
    main(config)
    assert started_runs == list(COMPARED)
    summary = json.loads((tmp_path / "replay_comparison.json").read_text())
    assert "--steps 3" in summary["command"]
    assert {name: len(runs["by_seed"]) for name, runs in summary["variants"].items()} == dict.fromkeys(
        COMPARED, 2
    )
    assert (tmp_path / "replay_comparison.png").stat().st_size > 10_000
    assert "live, GSPO" in capsys.readouterr().out
    with pytest.raises(ValueError, match="r3 contains runs with other settings"):
        main(dataclasses.replace(config, steps=400))
