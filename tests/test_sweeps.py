"""Sweeps: the curves of runs, the comparison of variants, resuming a stopped sweep, and comparing any two runs."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import compare_runs, sweep
from experiments.learning_curves import Curve, decoding_steps_to, mean_and_error, mean_curve, read_curve
from experiments.rl.metrics import METRICS
from experiments.rl.run_folder import UNSAVED_SETTINGS
from experiments.rl.settings import plain_settings
from experiments.run import main
from experiments.sweep_report import ROWS, make_table, summarise

EVALUATIONS = [0.25, 0.5, 0.75]
LEARNED = [
    {
        "kind": "learn",
        "step": 1,
        "batch/tokens_run": tokens,
        "response/decoding_steps": decoding,
        "response/slots_used_share": used,
        "critic/explained_variance": explained,
    }
    for tokens, decoding, used, explained in [(1000, 90, 0.2, None), (3000, 30, 0.6, 0.125)]
]
LINES = [
    {"kind": "warm-up", "step": 0, "warmup/loss": 3.0},
    {"kind": "evaluation", "step": 1, "evaluation/reward": EVALUATIONS[0]},
    LEARNED[0],
    {"kind": "evaluation", "step": 2, "evaluation/reward": EVALUATIONS[1]},
    LEARNED[1],
    {"kind": "evaluation", "step": 3, "evaluation/reward": EVALUATIONS[2]},
]


def curve(reward, tokens=(0, 1000, 2000), decoding_steps=(0, 100, 200)):
    return Curve(list(tokens), list(decoding_steps), list(reward), 0.5, None)


def lines_of(reward, tokens, decoding_steps):
    """Make the lines of a run with an evaluation after each learning step."""
    result = [{"kind": "evaluation", "step": 0, "evaluation/reward": reward[0]}]
    for step, value in enumerate(reward[1:]):
        learned = {
            "batch/tokens_run": int(np.diff(tokens)[step]),
            "response/decoding_steps": int(np.diff(decoding_steps)[step]),
            "response/slots_used_share": 0.5,
        }
        result += [
            {"kind": "learn", "step": step, **learned},
            {"kind": "evaluation", "step": step + 1, "evaluation/reward": value},
        ]
    return result


def test_read_curve_counts_what_was_used_before_each_evaluation():
    read = read_curve(LINES)
    assert read.tokens == [0, 1000, 4000]
    assert read.decoding_steps == [0, 90, 120]
    assert read.reward == EVALUATIONS
    # 90 decoding steps used a fifth of the slots, and 30 steps used three fifths.
    assert read.slots_used_share == pytest.approx((90 * 0.2 + 30 * 0.6) / 120)
    assert read.explained_variance == 0.125


def test_summary_compares_at_the_tokens_that_all_runs_have_run():
    slow = [lines_of(reward, (0, 1000, 2000), (0, 100, 200)) for reward in ([0.2, 0.4, 0.6], [0.4, 0.6, 0.8])]
    # Twice as fast over decoding steps, and ends at 1,500 tokens.
    fast = [lines_of([0.2, 0.5, 0.8], (0, 500, 1500), (0, 40, 80))] * 2
    summary = summarise({"grpo": slow, "tppo": fast})
    assert {numbers["tokens"] for numbers in summary.values()} == {1500}
    reward = summary["grpo"]["reward"]
    assert (reward["mean"], reward["error"]) == pytest.approx((0.6, 0.1))  # 0.5 and 0.7 at 1,500 tokens
    assert reward["by_seed"] == pytest.approx([0.5, 0.7])
    assert summary["grpo"]["decoding_steps"]["mean"] == pytest.approx(150)
    assert summary["tppo"]["reward_end"]["mean"] == pytest.approx(0.8)
    # From 0.5 at 40 decoding steps to 0.8 at 80, the mean is 0.6 a third of the way; GRPO's is 0.6 at 150.
    assert summary["tppo"]["decoding_steps_to_first"]["mean"] == pytest.approx((40 + 40 / 3) / 150)
    assert summary["grpo"]["decoding_steps_to_first"]["mean"] == pytest.approx(1)
    assert summary["grpo"]["explained_variance"] is summary["grpo"]["mismatch"] is None


def test_a_reward_that_is_never_reached_has_no_decoding_steps():
    assert decoding_steps_to([curve([0.2, 0.3, 0.3])], 0.31) is None
    assert decoding_steps_to([curve([0.4, 0.3, 0.3])], 0.31) == 0


def test_mean_curve_ends_where_the_shortest_run_ends():
    places, mean, error = mean_curve([[0, 10, 20], [0, 5, 15]], [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    assert places.tolist() == [0, 10, 15]
    np.testing.assert_allclose(mean, [0, (1 + 1.5) / 2, (1.5 + 2) / 2])
    np.testing.assert_allclose(error, [0, 0.25, 0.25])


def learned(mismatch, *, live):
    """Make the line of a learning step, with the mismatch as its mean, and metrics that follow from it."""
    return LEARNED[0] | {
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


@pytest.mark.parametrize("live", [False, True])
def test_summary_has_the_metrics_as_they_ran(live):
    assert learned(1.0, live=live).keys() - {"kind", "step"} <= METRICS.keys()
    run = [learned(mismatch, live=live) for mismatch in (0.125, 0.375, 2.0)]
    summary = summarise({"one": [run]})["one"]
    numbers = {name: summary[name]["mean"] for name in ROWS}
    assert numbers["mismatch"] == pytest.approx(2.5 / 3)
    assert (numbers["mismatch_99"], numbers["mismatch_largest"]) == (pytest.approx(2.5), 18.0)
    assert numbers["routing_changed"] == pytest.approx(0.25 / 3)
    assert (numbers["kl"], numbers["skipped"], numbers["step_seconds"]) == (0.25, 4, 0.375)
    expected = (1.5, 1.75, 750) if live else (1.0, 1.0, 500)
    names = ("imbalance", "imbalance_recompute", "modelled_milliseconds")
    assert tuple(numbers[name] for name in names) == expected
    assert summary["reward"] is summary["mismatch"]["error"] is None
    assert make_table({"one": summary}).row_count == len(ROWS) + 1  # and the slots used


def test_mean_and_error_is_the_deviation_of_a_sample():
    values = np.array([0.5, 0.75, 0.7])
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(sum(values) / 3)
    assert error == pytest.approx(np.sqrt(sum((value - mean) ** 2 for value in values) / 2 / 3))
    assert mean_and_error(np.array([[0.5, 1.0]]))[1] is None


@pytest.fixture
def started_runs(monkeypatch):
    """Replace training by runs that only write their files. The second one that starts is stopped."""
    started = []

    def run_train(config, console, *, name):
        started.append(config)
        folder = config.resume or config.out
        for seed in config.seeds:
            (folder / f"seed-{seed}").mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(line) + "\n" for line in LINES)
            (folder / f"seed-{seed}" / "metrics.jsonl").write_text(text)
        settings = {
            key: value for key, value in plain_settings(config).items() if key not in UNSAVED_SETTINGS
        }
        (folder / "config.json").write_text(json.dumps(settings))
        if len(started) != 2:
            (folder / "summary.json").write_text("{}")

    monkeypatch.setattr(sweep, "run_train", run_train)
    monkeypatch.setattr(sweep, "dry_run", lambda config, plan: SimpleNamespace(refusals=()))
    return started


def test_a_sweep_neither_repeats_nor_mixes_runs(tmp_path, started_runs, capsys):
    command = [
        "demo",
        "--sweep",
        "algorithm=grpo,ppo",
        "--sweep",
        "learning_rate=1e-3,1e-4",
        "--set",
        "seeds=[0, 1]",
    ]
    command += ["--out", str(tmp_path)]
    assert main([*command, "--steps", "2"]) == 0
    assert len(started_runs) == 2
    assert "run the same command to resume" in capsys.readouterr().out
    assert not (tmp_path / "sweep.json").exists()
    assert main([*command, "--steps", "2"]) == 0
    runs = [(config.algorithm, config.learning_rate, config.seeds, config.steps) for config in started_runs]
    grid = [(name, rate, (0, 1), 2) for name in ("grpo", "ppo") for rate in (1e-3, 1e-4)]
    assert runs == [grid[0], grid[1], *grid[1:]], "the stopped one is resumed"
    assert started_runs[2].resume == tmp_path / "algorithm=grpo,learning_rate=1e-4"
    results = json.loads((tmp_path / "sweep.json").read_text())
    assert "algorithm=grpo,ppo" in results["command"]
    assert list(results["summary"]) == [path.name for path in sorted(tmp_path.iterdir()) if path.is_dir()]
    assert results["summary"]["algorithm=ppo,learning_rate=1e-3"]["reward_end"]["by_seed"] == [0.75, 0.75]
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    assert main([*command, "--steps", "3"]) == 2
    assert "contains runs with other settings; choose another --out" in capsys.readouterr().err
    assert main(["demo", "--sweep", "steps=1,2", "--out", str(tmp_path)]) == 2
    assert "is a sweep of other variants" in capsys.readouterr().err
    assert json.loads((tmp_path / "sweep.json").read_text()) == results
    # A variant alone is made in its folder of the sweep, where it is complete.
    assert main([*command, "--steps", "2", "--variant", "algorithm=ppo,learning_rate=1e-4"]) == 0
    assert len(started_runs) == 5


def test_a_sweep_starts_only_if_every_variant_can_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "run_train", None)
    command = ["laptop", "--sweep", "task=copy,copie", "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "variant task=copie: task 'copie' must be one of" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_compare_runs_shows_what_differs(tmp_path, started_runs, capsys):
    assert main(["demo", "--sweep", "critic.width=32,64", "--algorithm", "ppo", "--out", str(tmp_path)]) == 0
    assert main(["demo", "--sweep", "critic.width=32,64", "--algorithm", "ppo", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    folders = tuple(tmp_path / f"critic.width={width}" for width in (32, 64))
    for folder, sources in zip(folders, ("0123456789ab", "ba9876543210"), strict=True):
        (folder / "starts.json").write_text(
            json.dumps([{"date": sources, "seed": 0, "step": 0, "sources": sources, "jax": "0.11"}])
        )
    compare_runs.main(compare_runs.CompareRuns(folders, figure=tmp_path / "figure.png"))
    text = capsys.readouterr().out
    for words in (
        r"critic.width +32 +64",
        r"sources +0123456789ab +ba9876543210",
        r"at the end +0.750 +0.750",
    ):
        assert re.search(words, text), words
    assert "learning_rate" not in text
    assert "0.11" not in text
    assert not re.search(r"^ *date ", text, re.MULTILINE)
    assert (tmp_path / "figure.png").exists()
    for folder in folders:
        (folder / "starts.json").unlink()
    compare_runs.main(compare_runs.CompareRuns(folders))
    assert "Code that differs: not recorded" in capsys.readouterr().out
    with pytest.raises(ValueError, match="give two or more different ones"):
        compare_runs.main(compare_runs.CompareRuns(folders[:1]))
