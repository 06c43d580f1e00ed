"""Training runs from configurations: ``python -m experiments.run CONFIG [options]``.

CONFIG is a TOML file, or the name of a configuration that ``--list`` shows (those in ``experiments/configs``).

    --set KEY=VALUE       another value for a setting of the file, such as critic.width=32; may be given several times
    --sweep KEY=A,B,C     runs with each of these values; several sweeps give all combinations
    --variant NAME        only this variant of the file or of the sweep
    --dry                 run nothing: say what would be refused, the memory by stage and item, and a modelled step
    --trace NAME|PATH     the routing of which a dry run plans a batch; by default recorded or synthetic
    --cluster NAME        the hardware of a dry run, such as h100; this machine's if it is not given
    --list                the configurations and what they need
    CONFIG --help         all settings, which are also options: --steps 10 is --set steps=10

A configuration with variants, or with ``--sweep``, makes a sweep: its runs are made one after the other, over all
seeds, the same command resumes a stopped one, and a table and a figure compare them at the end. Bad input ends the
program with exit status 2 and one line on standard error, and leaves no half-written files. To compare planners
without training, use ``relibra compare``. Compiled programs are kept in ``~/.cache/relibra_jax`` for later runs;
``--no-keep-programs`` turns this off.
"""

import argparse
import dataclasses
import functools
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import tyro
from rich import box
from rich.markup import escape
from rich.table import Table

from experiments.program import wide_console
from experiments.rl.config_file import (
    ConfigFile,
    config_names,
    parse_assignments,
    read_config,
    sweep_variants,
)
from experiments.rl.configs import Train
from experiments.rl.devices import compile_quickly
from experiments.rl.dry_run import dry_run
from experiments.rl.dry_tables import print_dry_run
from experiments.rl.launchers import find_launch
from experiments.rl.run_folder import saved_config
from experiments.rl.settings import unchecked_settings
from experiments.rl.train import run_train
from experiments.sweep import run_sweep, run_variant
from relibra_jax.support.bad_input import exit_status
from relibra_jax.support.parsing import parse_options
from relibra_jax.support.programs import keep_programs_unless
from relibra_jax.support.suggestions import look_up

console = wide_console()

PROGRAM: Final = "python -m experiments.run"


def list_configs() -> None:
    """Print the configurations that have a name, with their main settings and what they need."""
    table = Table("name", "description", title=f"{PROGRAM} NAME [options]", box=box.SIMPLE_HEAD)
    for name in config_names():
        config = read_config(name)
        run = config.train(next(iter(config.variants), None))
        sizes = (
            f"{run.task_name}, {run.algorithm}, {run.model_name}, {run.samples} samples per batch,"
            f" {run.num_ranks} ranks, {run.planner}"
        )
        length = (
            f"{run.warmup_steps} supervised steps, then {run.steps} learning steps;"
            f" seeds {', '.join(map(str, run.seeds))}"
        )
        variants = [f"variants: {', '.join(config.variants)}; above is the first"] if config.variants else []
        lines = [config.description, f"needs {config.needs}", sizes, length, *variants]
        table.add_row(name, escape("\n".join(lines)))
    console.print(table)


class Options(NamedTuple):
    """The options of this program, apart from those that are settings."""

    set: list[str]
    sweep: list[str]
    variant: str | None
    dry: bool
    trace: str | None
    cluster: str | None
    out: Path | None
    resume: Path | None
    settings: list[str]
    """The other options, with ``--out`` and ``--resume``, which are settings too."""


def own_options(args: Sequence[str]) -> Options:
    """Split the options of this program from those that are settings.

    Args:
        args: the options, as the command line gives them.
    """
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    own.add_argument("--sweep", action="append", default=[], metavar="KEY=A,B,C")
    own.add_argument("--variant")
    own.add_argument("--dry", action="store_true")
    own.add_argument("--trace", metavar="NAME|PATH")
    own.add_argument("--cluster")
    known, settings = own.parse_known_args(args)
    folders = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--out", "--resume"):  # the parser of all settings rejects them without a folder
        folders.add_argument(name, type=Path, nargs="?")
    return Options(**vars(known), **vars(folders.parse_known_args(settings)[0]), settings=settings)


def parse_runs(config: ConfigFile, own: Options) -> dict[str | None, Train]:
    """Return the settings of the runs that a command asks for.

    Args:
        config: the configuration.
        own: the options.

    Returns:
        The settings by the name of the variant; with None as the only name if there are no variants.

    Raises:
        ValueError: if an option is unknown, its value cannot be parsed, or the settings contradict each other.
        SystemExit: if the options ask for help.
    """
    parse = functools.partial(
        tyro.cli, Train, prog=f"{PROGRAM} {config.name}", description=config.description
    )
    if own.resume is not None:
        if own.set or own.sweep or own.variant:
            raise ValueError(
                f"--resume {own.resume}: the settings of the run are in its folder, so --set, --sweep and --variant are"
                " not for it; the same command resumes a sweep"
            )
        return {None: parse_options(functools.partial(parse, default=saved_config(own.resume)), own.settings)}
    settings, swept = parse_assignments(own.set, "--set"), sweep_variants(own.sweep)
    if config.variants and swept:
        raise ValueError(f"--sweep {own.sweep[0]}: {config.name} is a sweep already, of its variants")
    config = config._replace(variants=config.variants or swept)
    names: list[str | None] = list(config.variants) or [None]
    if own.variant is not None:
        if not config.variants:
            raise ValueError(f"--variant {own.variant}: {config.name} has no variants")
        look_up("--variant ", own.variant, config.variants)
        names = [own.variant]
    runs: dict[str | None, Train] = {}
    for name in names:
        default = unchecked_settings(Train, config.all_settings(name) | settings)
        with config.place_in_errors(name):
            runs[name] = parse_options(functools.partial(parse, default=default), own.settings)
    return runs


def main(args: list[str] | None = None) -> int:
    """Run one configuration.

    Args:
        args: the name or file of the configuration, and options. None uses the arguments of the process.

    Returns:
        The exit status: 0 on success, 2 on bad input.
    """
    arguments = sys.argv[1:] if args is None else args
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    if name == "--list":
        return exit_status(list_configs)
    return exit_status(lambda: _run(name, keep_programs_unless(rest)))


def _run(name: str, args: list[str]) -> int | None:
    config, own = read_config(name), own_options(args)
    runs = parse_runs(config, own)
    if own.dry:
        compile_quickly()
        return max(_run_dry(variant, run, own.trace, own.cluster) for variant, run in runs.items())
    for option in ("trace", "cluster"):
        if (value := getattr(own, option)) is not None:
            raise ValueError(f"--{option} {value} is for --dry")
    if None in runs:
        run_train(runs[None], console, name=name)
        return None
    out = own.out or Path("out") / config.name
    variants = {
        str(variant): dataclasses.replace(run, out=out / str(variant)) for variant, run in runs.items()
    }
    if own.variant is not None:
        run_variant(name, variants[own.variant], console)
        return None
    if find_launch(os.environ) is not None:
        raise ValueError(
            f"{name} is a sweep, which one process makes: with several processes, give a --variant to each start"
        )
    run_sweep(name, variants, out, console, command=_command(name, args))
    return None


def _run_dry(variant: str | None, run: Train, trace: str | None, cluster: str | None) -> int:
    if variant is not None:
        console.rule(escape(variant))
    return print_dry_run(dry_run(run, trace=trace, cluster=cluster), console)


def _command(name: str, args: Sequence[str]) -> str:
    """Return the command without ``--out``: the results are the same in any folder."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out")
    return shlex.join([*PROGRAM.split(), name, *parser.parse_known_args(args)[1]])


if __name__ == "__main__":
    sys.exit(main())
