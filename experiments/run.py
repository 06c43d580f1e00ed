"""Training runs: ``python -m experiments.run NAME [--overrides]``.

``--list`` shows the named runs, and ``NAME --help`` the settings of one, all of which can be overridden. Bad input ends
the program with exit status 2 and one line on standard error, and leaves no half-written files. To compare planners
without training, use ``relibra compare``. Compiled programs are kept in ``~/.cache/relibra_jax`` for later runs;
``--no-keep-programs`` turns this off.
"""

import argparse
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.rl.configs import Train
from experiments.rl.run_folder import saved_config
from experiments.rl.train import run_train
from relibra_jax.support.bad_input import exit_status
from relibra_jax.support.parsing import parse_options
from relibra_jax.support.programs import keep_programs_unless
from relibra_jax.support.suggestions import suggest_names

console = Console()

PROGRAM: Final = "python -m experiments.run"
CONFIGS: Final[Mapping[str, Train]] = MappingProxyType(
    {"demo": Train(), "learn": Train(seeds=(0, 1, 2), steps=80)}
)
"""The settings of each named run."""
SUMMARIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "demo": "RL quickstart: 2 x 4 host devices, a tiny model, under five minutes",
        "learn": "the same with 80 learning steps on three seeds, about fifteen minutes",
    }
)
"""A description of each named run, in one line."""


def list_runs() -> None:
    """Print the named training runs, with their main settings."""
    table = Table("name", "description", title=f"{PROGRAM} NAME [--overrides]", box=box.SIMPLE_HEAD)
    for name, run in CONFIGS.items():
        sizes = (
            f"{run.task}, {run.algorithm}, {run.model_name}, {run.samples} samples per batch, {run.planner}"
        )
        length = (
            f"{run.warmup_steps} supervised steps, then {run.steps} learning steps;"
            f" seeds {', '.join(map(str, run.seeds))}"
        )
        table.add_row(name, f"{SUMMARIES[name]}\n{sizes}\n{length}")
    console.print(table)


def parse_run(name: str, default: Train, args: list[str]) -> Train:
    """Parse the overrides of a training run.

    Args:
        name: the name of the run.
        default: the settings that ``args`` override.
        args: the overrides, as the command line gives them.

    Returns:
        The settings of the run.

    Raises:
        ValueError: if an override is unknown, its value cannot be parsed, or the settings contradict each other.
        SystemExit: if ``args`` ask for help.
    """
    options = {"default": default, "prog": f"{PROGRAM} {name}", "description": SUMMARIES[name]}
    return parse_options(functools.partial(tyro.cli, Train, **options), args)


def resumed_folder(args: list[str]) -> Path | None:
    """Return the folder that ``--resume`` names, or None. Its settings are the defaults of all other options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # The parser of all settings rejects --resume without a folder.
    parser.add_argument("--resume", type=Path, nargs="?")
    return parser.parse_known_args(args)[0].resume


def main(args: list[str] | None = None) -> int:
    """Run one training run.

    Args:
        args: the name of the run and its overrides. None uses the arguments of the process.

    Returns:
        The exit status: 0 on success, 2 on bad input.
    """
    name, *rest = (sys.argv[1:] if args is None else args) or [""]
    if name == "--list":
        list_runs()
        return 0
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    return exit_status(lambda: _run(name, keep_programs_unless(rest)))


def _run(name: str, overrides: list[str]) -> None:
    if name not in CONFIGS:
        hint = suggest_names(name, CONFIGS)
        raise ValueError(f"training run {name!r} must be one of {', '.join(CONFIGS)}{hint}")
    resume = resumed_folder(overrides)
    default = CONFIGS[name] if resume is None else saved_config(resume)
    run_train(parse_run(name, default, overrides), console, name=name)


if __name__ == "__main__":
    sys.exit(main())
