"""The table of commands: the name of each, its options, and the function that runs it."""

import functools
from collections.abc import Callable
from typing import Any, Final

import tyro
from rich.console import Console

from relibra_jax.cli.advise import Advise, run_advise
from relibra_jax.cli.compare import Compare, run_compare
from relibra_jax.cli.inspect import Inspect, run_inspect
from relibra_jax.cli.plan import MakePlan, run_plan
from relibra_jax.support.bad_input import exit_status
from relibra_jax.support.parsing import HELP, parse_options
from relibra_jax.support.programs import keep_programs_unless
from relibra_jax.support.suggestions import suggest_names

PROGRAM: Final = "relibra"

COMMANDS: Final[dict[str, tuple[type, Callable[[Any, Console], None]]]] = {
    "compare": (Compare, run_compare),
    "plan": (MakePlan, run_plan),
    "inspect": (Inspect, run_inspect),
    "advise": (Advise, run_advise),
}
"""The type of each command's options, whose docstring is its help text, and the function that runs the command."""


def run_command(args: list[str]) -> int:
    """Run one command. Bad input ends with one line on standard error and leaves no half-written file.

    Args:
        args: the command and its options.

    Returns:
        The exit status: 0 for success, or 2 for bad input.

    Raises:
        SystemExit: if the arguments ask for help.
    """
    return exit_status(lambda: _run(keep_programs_unless(args)))


def _run(args: list[str]) -> None:
    name, *rest = args or [""]
    if not name.startswith("-") and name not in COMMANDS:
        hint = suggest_names(name, COMMANDS)
        raise ValueError(f"command {name!r} must be one of {', '.join(COMMANDS)}{hint}")
    if name in COMMANDS and not HELP & set(rest):
        # Each command is parsed alone, so that an error suggests only options of this command.
        parse_command = functools.partial(tyro.cli, COMMANDS[name][0], prog=f"{PROGRAM} {name}")
        options = parse_options(parse_command, rest)
    else:
        types = {name: options for name, (options, _) in COMMANDS.items()}
        parse_any_command = functools.partial(
            tyro.extras.subcommand_cli_from_dict, types, prog=PROGRAM, description=_DESCRIPTION
        )
        options = parse_options(parse_any_command, args)
    # Brackets and colons in the names and paths of users are neither markup nor emoji.
    dict(COMMANDS.values())[type(options)](options, Console(markup=False, emoji=False))


_DESCRIPTION = (
    "Plan and compare expert load balancing for reinforcement learning of mixture-of-experts models. The commands read"
    " recorded routing (a trace), plan from it, and report how evenly work is spread, how long it takes in modelled"
    " time, and how much memory it needs. Compiled programs are kept in ~/.cache/relibra_jax for the next run;"
    " --no-keep-programs turns this off. Training runs are started with: python -m experiments.run NAME."
)
