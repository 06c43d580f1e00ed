"""``python -m experiments.algorithms``: the summary of metrics, and resuming a stopped comparison."""

import dataclasses
import json

import pytest

from experiments import algorithms
from experiments.algorithms import COMPARED, Algorithms, algorithm_config, main, reward_over_tokens, summarise
from experiments.rl.run_folder import UNSAVED_SETTINGS

EVALUATIONS = [0.25, 0.5, 0.75]
LEARNED = [
    {
        "kind": "learn",
        "batch/tokens_run": tokens,
        "response/decoding_steps": decoding,
        "response/slots_used_share": used,
        "time/generate_seconds": 0.5,
        "time/step_seconds": 2.0,
        "balance/imbalance": imbalance,
        "balance/imbalance_static": 1.5,
    }
    for tokens, decoding, used, imbalance in [(1000, 90, 0.2, 1.0), (3000, 30, 0.6, 1.2)]
]
LINES = [
    {"kind": "warm-up", "warmup/loss": 3.0},
    *({"kind": "evaluation", "evaluation/reward": reward} for reward in EVALUATIONS[:1]),
    LEARNED[0],
    *({"kind": "evaluation", "evaluation/reward": reward} for reward in EVALUATIONS[1:2]),
    LEARNED[1],
    *({"kind": "evaluation", "evaluation/reward": reward} for reward in EVALUATIONS[2:]),
]


def test_reward_over_tokens_counts_the_tokens_run_before_each_evaluation():
    assert reward_over_tokens(LINES) == ([0, 1000, 4000], EVALUATIONS)


def test_summarise_totals_and_averages_the_learning_steps():
    summary_of_run = summarise(LINES)
    assert (summary_of_run["reward_start"], summary_of_run["reward_end"]) == (0.25, 0.75)
    assert (
        summary_of_run["tokens_run"],
        summary_of_run["decoding_steps"],
        summary_of_run["generate_seconds"],
    ) == (4000, 120, 1.0)
    # 90 decoding steps used a fifth of the slots, and 30 steps used three fifths.
    assert summary_of_run["slots_used_share"] == pytest.approx((90 * 0.2 + 30 * 0.6) / 120)
    assert summary_of_run["imbalance"] == pytest.approx(1.1)
    assert summary_of_run["imbalance_worst_step"] == 1.2


def test_algorithm_config_differs_only_in_the_algorithm():
    configs = [algorithm_config(algorithm, Algorithms(steps=3)) for algorithm in COMPARED]
    same = {"algorithm": "grpo", "window": None, "critic": configs[0].critic, "out": configs[0].out}
    assert [config.algorithm for config in configs] == list(COMPARED)
    assert all(dataclasses.replace(config, **same) == configs[0] for config in configs)


def test_main_neither_repeats_nor_mixes_runs(tmp_path, monkeypatch):
    started_runs = []

    def run_train(config, console, *, name):
        started_runs.append(name)
        for seed in config.seeds:
            folder = config.out / f"seed-{seed}"
            folder.mkdir(parents=True)
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
        settings = {
            name: value for name, value in dataclasses.asdict(config).items() if name not in UNSAVED_SETTINGS
        }
        (config.out / "config.json").write_text(json.dumps(settings, default=str))
        if len(started_runs) != 2:
            (config.out / "summary.json").write_text("{}")

    monkeypatch.setattr(algorithms, "run_train", run_train)
    config = Algorithms(out=tmp_path, seeds=(0, 1), steps=2)
    main(config)
    assert not (tmp_path / "algorithms.json").exists(), "the second algorithm was stopped"
    (tmp_path / "grpo").rename(tmp_path / "finished")
    with pytest.raises(ValueError, match="ppo contains runs with other settings"):
        main(dataclasses.replace(config, steps=3))
    (tmp_path / "finished").rename(tmp_path / "grpo")
    (tmp_path / "ppo" / "summary.json").write_text("{}")
    main(config)
    assert started_runs == ["grpo", "ppo", "tppo"]
    summary = json.loads((tmp_path / "algorithms.json").read_text())
    assert summary["command"] == "python -m experiments.algorithms --seeds 0 1 --steps 2"
    assert {name: len(runs) for name, runs in summary["algorithms"].items()} == dict.fromkeys(COMPARED, 2)
    assert (tmp_path / "algorithms.png").stat().st_size > 10_000
    # The settings of finished runs are checked, too.
    for changes in ({"steps": 400}, {"seeds": (0, 1, 2)}):
        with pytest.raises(ValueError, match="grpo contains runs with other settings"):
            main(dataclasses.replace(config, **changes))
    assert json.loads((tmp_path / "algorithms.json").read_text()) == summary
