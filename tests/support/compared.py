"""Training runs that only write their files, for the programs that compare variants."""

import dataclasses
import json

from experiments.rl.run_folder import UNSAVED_SETTINGS


def fake_runs(lines_of, *, stopped=2):
    """Make a stand-in for `experiments.rl.train.run_train`.

    Args:
        lines_of: a function from a run's settings to its lines of metrics.
        stopped: the number of the call, from 1, after which the run counts as stopped.

    Returns:
        The stand-in, and a list that it extends with the name of every run that it starts.
    """
    started_runs = []

    def run_train(config, console, *, name):
        started_runs.append(name)
        for seed in config.seeds:
            folder = config.out / f"seed-{seed}"
            folder.mkdir(parents=True)
            lines = lines_of(config)
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        settings = {
            name: value for name, value in dataclasses.asdict(config).items() if name not in UNSAVED_SETTINGS
        }
        (config.out / "config.json").write_text(json.dumps(settings, default=str))
        if len(started_runs) != stopped:
            (config.out / "summary.json").write_text("{}")

    return run_train, started_runs
