"""``python -m experiments.algorithms``: the curves of runs, their summary, and resuming a stopped comparison."""

import dataclasses
import json

import numpy as np
import pytest
from support.compared import fake_runs

from experiments import compared_runs
from experiments.algorithms import (
    VARIANTS,
    Algorithms,
    main,
    summarise,
    variant_config,
)
from experiments.learning_curves import Curve, decoding_steps_to, mean_curve, read_curve
from experiments.rl.correction import Correction

EVALUATIONS = [0.25, 0.5, 0.75]
LEARNED = [
    {
        "kind": "learn",
        "batch/tokens_run": tokens,
        "response/decoding_steps": decoding,
        "response/slots_used_share": used,
        "critic/explained_variance": explained,
    }
    for tokens, decoding, used, explained in [(1000, 90, 0.2, None), (3000, 30, 0.6, 0.125)]
]
LINES = [
    {"kind": "warm-up", "warmup/loss": 3.0},
    {"kind": "evaluation", "evaluation/reward": EVALUATIONS[0]},
    LEARNED[0],
    {"kind": "evaluation", "evaluation/reward": EVALUATIONS[1]},
    LEARNED[1],
    {"kind": "evaluation", "evaluation/reward": EVALUATIONS[2]},
]


def curve(reward, tokens=(0, 1000, 2000), decoding_steps=(0, 100, 200)):
    return Curve(list(tokens), list(decoding_steps), list(reward), 0.5, None)


def test_read_curve_counts_what_was_used_before_each_evaluation():
    read = read_curve(LINES)
    assert read.tokens == [0, 1000, 4000]
    assert read.decoding_steps == [0, 90, 120]
    assert read.reward == EVALUATIONS
    # 90 decoding steps used a fifth of the slots, and 30 steps used three fifths.
    assert read.slots_used_share == pytest.approx((90 * 0.2 + 30 * 0.6) / 120)
    assert read.explained_variance == 0.125


def test_summary_compares_at_the_tokens_that_all_runs_have_run():
    slow = [curve([0.2, 0.4, 0.6]), curve([0.4, 0.6, 0.8])]
    # Twice as fast over decoding steps, and ends at 1,500 tokens.
    fast = [curve([0.2, 0.5, 0.8], (0, 500, 1500), (0, 40, 80))] * 2
    summary = summarise({"grpo": slow, "tppo": fast})
    assert {numbers["tokens"] for numbers in summary.values()} == {1500}
    mean, error = summary["grpo"]["reward"]
    assert (mean, error) == pytest.approx((0.6, 0.1))  # 0.5 and 0.7 at 1,500 tokens
    assert summary["grpo"]["decoding_steps"][0] == pytest.approx(150)
    assert summary["tppo"]["reward_end"] == pytest.approx((0.8, 0))
    # From 0.5 at 40 decoding steps to 0.8 at 80, the mean is 0.6 a third of the way; GRPO's is 0.6 at 150.
    assert summary["tppo"]["decoding_steps_to_grpo"] == pytest.approx((40 + 40 / 3) / 150)
    assert summary["grpo"]["decoding_steps_to_grpo"] == pytest.approx(1)
    assert summary["grpo"]["explained_variance"] is None


def test_a_reward_that_is_never_reached_has_no_decoding_steps():
    assert decoding_steps_to([curve([0.2, 0.3, 0.3])], 0.31) is None
    assert decoding_steps_to([curve([0.4, 0.3, 0.3])], 0.31) == 0


def test_mean_curve_ends_where_the_shortest_run_ends():
    places, mean, error = mean_curve([[0, 10, 20], [0, 5, 15]], [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    assert places.tolist() == [0, 10, 15]
    np.testing.assert_allclose(mean, [0, (1 + 1.5) / 2, (1.5 + 2) / 2])
    np.testing.assert_allclose(error, [0, 0.25, 0.25])


def test_variants_differ_only_in_algorithm_window_and_correction():
    configs = {variant: variant_config(variant, Algorithms(steps=3)) for variant in VARIANTS}
    plain = configs["grpo"]
    same = {"algorithm": "grpo", "window": None, "correction": Correction(), "steps": 3, "out": plain.out}
    assert all(dataclasses.replace(config, **same) == plain for config in configs.values())
    kinds = {variant: config.correction.kind for variant, config in configs.items()}
    assert [variant for variant, kind in kinds.items() if kind == "truncate"] == [
        "grpo-windows",
        "ppo-windows",
    ]


def test_main_neither_repeats_nor_mixes_runs(tmp_path, monkeypatch):
    run_train, started_runs = fake_runs(lambda config: LINES)
    monkeypatch.setattr(compared_runs, "run_train", run_train)
    config = Algorithms(out=tmp_path, seeds=(0, 1), steps=2, variants=("grpo", "ppo", "tppo"))
    main(config)
    assert not (tmp_path / "algorithms.json").exists(), "the second algorithm was stopped"
    (tmp_path / "grpo").rename(tmp_path / "finished")
    with pytest.raises(ValueError, match="ppo contains runs with other settings"):
        main(dataclasses.replace(config, steps=3))
    (tmp_path / "finished").rename(tmp_path / "grpo")
    (tmp_path / "ppo" / "summary.json").write_text("{}")
    main(config)
    assert started_runs == ["grpo", "ppo", "tppo"]
    results = json.loads((tmp_path / "algorithms.json").read_text())
    assert results["command"] == (
        "python -m experiments.algorithms --variants grpo ppo tppo --seeds 0 1 --steps 2"
    )
    assert {name: len(runs) for name, runs in results["runs"].items()} == {"grpo": 2, "ppo": 2, "tppo": 2}
    assert results["summary"]["tppo"]["reward"] == [0.75, 0]
    assert (tmp_path / "algorithms.png").stat().st_size > 10_000
    # The settings of finished runs are checked, too.
    for changes in ({"steps": 400}, {"seeds": (0, 1, 2)}):
        with pytest.raises(ValueError, match="grpo contains runs with other settings"):
            main(dataclasses.replace(config, **changes))
    assert json.loads((tmp_path / "algorithms.json").read_text()) == results


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task": "number"}, "task 'number' must be one of numbers, spell_backward; did you mean"),
        ({"variants": ("grpo", "tpo")}, "variants 'tpo' must be one of grpo, grpo-windows"),
        ({"variants": ("tppo",)}, "variants tppo must contain grpo, with which others are compared"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(changes, says):
    with pytest.raises(ValueError, match=says):
        Algorithms(**changes)
