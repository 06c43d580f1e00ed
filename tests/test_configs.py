"""Configurations: files, their errors with file, line and key, options that override them, and saved settings."""

import dataclasses
import json
from pathlib import Path

import pytest

from experiments.rl.config_file import (
    config_names,
    parse_assignments,
    parse_config,
    read_config,
    sweep_variants,
)
from experiments.rl.configs import Train
from experiments.rl.correction import Correction
from experiments.rl.dry_run import dry_run
from experiments.rl.run_folder import saved_config
from experiments.rl.settings import flat, make_settings, plain_settings
from experiments.run import main, own_options, parse_runs
from relibra_jax.evaluation import Ranks

FILE = """
description = "a test"

[settings]
task = "numbers"
ranks = {nodes = 1, replica_slots = 0}
learning_rate = 1
window = "none"
seeds = [3, 4]

[settings.critic]
clip = 0.5

[variants.plain]

[variants.windows]
algorithm = "ppo"
window = 2
correction.kind = "truncate"
"""


def test_a_file_sets_what_it_names():
    config = parse_config(FILE.replace("[settings.critic]\nclip = 0.5", ""), Path("own/windows.toml"))
    assert (config.name, config.description, list(config.variants)) == (
        "windows",
        "a test",
        ["plain", "windows"],
    )
    plain = Train(
        task="numbers", ranks=Ranks(nodes=1, replica_slots=0), learning_rate=1.0, window=None, seeds=(3, 4)
    )
    assert config.train("plain") == plain
    windows = dataclasses.replace(plain, algorithm="ppo", window=2, correction=Correction(kind="truncate"))
    assert config.train("windows") == windows


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('task = "numbers"', "task = 3", "own.toml:5: task=3 must be of type str"),
        ("nodes = 1", 'nodes = "1"', "own.toml:6: ranks.nodes='1' must be of type int"),
        ("nodes = 1", "nodes = true", "own.toml:6: ranks.nodes=True must be of type int"),
        (
            "learning_rate",
            "learning_rat",
            "own.toml:7: learning_rat is not a setting; did you mean learning_rate?",
        ),
        ("[3, 4]", "[3, 4.5]", "own.toml:9: seeds=4.5 must be of type int"),
        ("[3, 4]", "3", "own.toml:9: seeds=3 must be of type list of int"),
        ("clip = 0.5", "clip = {low = 1}", "own.toml:12: critic.clip.low is not a setting"),
        ("window = 2", "window = 2.0", "own.toml:18: window=2.0 must be of type int or none"),
        (
            "[variants.plain]",
            "[variants]\nplain = 1\n",
            "own.toml:15: variant plain must be a table of settings",
        ),
        ("description", "descripton", "own.toml:2: descripton must be one of .*; did you mean description?"),
        ("description = ", "description = 3 #", "own.toml:2: description=3 must be a text"),
        ('"numbers"', '"numbers', "own.toml: not TOML: "),
    ],
)
def test_errors_name_file_line_and_key(old, new, says):
    assert FILE.count(old) >= 1
    with pytest.raises(ValueError, match=says):
        parse_config(FILE.replace(old, new, 1), Path("own.toml"))


def test_settings_that_contradict_each_other_name_the_variant():
    with pytest.raises(
        ValueError, match="own, variant windows: response_tokens=5 must be a multiple of window=2"
    ):
        parse_config(
            FILE.replace("seeds", "response_tokens = 5\nseeds").replace("clip = 0.5", ""), Path("own.toml")
        ).train("windows")


@pytest.mark.parametrize("name", config_names())
def test_every_configuration_fits_together_and_in_memory(name):
    config = read_config(name)
    assert config.description
    assert config.needs
    first, *_ = [config.train(variant) for variant in config.variants or [None]]
    refusals = dry_run(first, plan=False).refusals
    # The suite runs without reasoning-gym.
    assert not [line for line in refusals if "for tasks of reasoning-gym install the extra rl" not in line]


CRITIC = ["--set", "critic.width=32", "--set", "seeds=[5]", "--algorithm", "ppo"]


def test_options_override_a_file():
    # The algorithm of the option makes the critic's setting fit.
    runs = parse_runs(read_config("learn"), own_options(CRITIC))
    assert list(runs) == [None]
    assert (runs[None].critic.width, runs[None].seeds, runs[None].algorithm) == (32, (5,), "ppo")
    runs = parse_runs(read_config("algorithms"), own_options(["--variant", "tppo", "--steps", "3"]))
    assert {name: (run.algorithm, run.steps) for name, run in runs.items()} == {"tppo": ("tppo", 3)}


def test_sweeps_combine():
    variants = sweep_variants(["planner=static,relibra", "anneal_steps=0,5"])
    assert variants["planner=relibra,anneal_steps=0"] == {"planner": "relibra", "anneal_steps": 0}
    assert len(variants) == 4
    assert list(sweep_variants(["seeds=[0,1],[2]"]).values()) == [{"seeds": [0, 1]}, {"seeds": [2]}]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ["nowhere"],
            "configuration 'nowhere' must be a file with the ending .toml or one of algorithms, demo",
        ),
        (
            ["--resume", "out/demo"],
            "configuration '--resume' must be a file with the ending .toml or one of "
            f"{', '.join(config_names())}, before all options",
        ),
        (["nowhere.toml"], "nowhere.toml: no such file"),
        (["demo", "--set", "steps"], "--set steps: must be a setting and a value, as in steps=10"),
        (["demo", "--set", "stesp=1"], "--set stesp=1: stesp is not a setting; did you mean steps or"),
        (["demo", "--set", "steps=1.5"], "--set steps=1.5: steps=1.5 must be of type int"),
        (["demo", "--sweep", "steps=1,x"], "--sweep steps=x: steps='x' must be of type int"),
        (
            ["demo", "--sweep", "planner=static,relibre"],
            "demo, variant planner=relibre: planner 'relibre' must be",
        ),
        (["demo", "--variant", "ppo"], "--variant ppo: demo has no variants"),
        (["demo", "--sweep", "steps="], "--sweep steps=: must have at least one value, as in steps=A,B"),
        (["demo", "--sweep", "steps=1,1"], "--sweep steps=1,1: 1 is given twice"),
        (["demo", "--sweep", "steps=1", "--sweep", "steps=2"], "--sweep steps=2: steps is swept twice"),
        (["algorithms", "--variant", "pp"], "--variant 'pp' must be one of grpo, grpo-windows, ppo"),
        (
            ["algorithms", "--sweep", "steps=1,2"],
            "--sweep steps=1,2: algorithms is a sweep already, of its variants",
        ),
        (
            ["demo", "--resume", "x", "--set", "steps=1"],
            "--resume x: the settings of the run are in its folder",
        ),
    ],
)
def test_bad_commands_get_one_line(args, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {says}")
    assert not list(tmp_path.iterdir())


def test_a_sweep_is_made_by_one_process(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "node1:9000")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    assert main(["algorithms", "--out", str(tmp_path)]) == 2
    assert "algorithms is a sweep, which one process makes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"engine": ["http://host:1"], "model": "tests/golden/hf/qwen3_moe", "requests": {"weights": "out"}},
        {"algorithm": "ppo", "window": 2, "critic": {"width": 8, "clip": 0.5}, "seeds": [1, 2]},
        {"rollout_dtype": "bfloat16", "adamw": {"schedule": "cosine"}, "clip": {"dual": 3}},
    ],
)
def test_saved_settings_equal_the_settings(changes, tmp_path):
    config = make_settings(Train, flat(changes))
    (tmp_path / "config.json").write_text(json.dumps(plain_settings(config)))
    assert saved_config(tmp_path) == config


def test_saved_settings_of_another_version_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"critic": {"factor": 0.5}}')
    with pytest.raises(ValueError, match=r"not the settings of a run: critic\.factor is not a setting"):
        saved_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="not the settings of a run"):
        saved_config(tmp_path)
    assert parse_assignments([], "--set") == {}
