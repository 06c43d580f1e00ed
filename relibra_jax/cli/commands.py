"""The table of commands: what each is called, the options that it takes, and what it does with them."""

import functools
from collections.abc import Callable
from typing import Any, Final

import tyro
from rich.console import Console

from relibra_jax.cli.advise.command import Advise, run_advise
from relibra_jax.cli.claims.command import Claims, run_claims
from relibra_jax.cli.compare import Compare, run_compare
from relibra_jax.cli.deploy.command import Deploy, run_deploy
from relibra_jax.cli.inspect import Inspect, run_inspect
from relibra_jax.cli.multiplex.command import Multiplex, run_multiplex
from relibra_jax.cli.parsing import HELP, parse_options
from relibra_jax.cli.plan import MakePlan, run_plan
from relibra_jax.cli.refusals import exit_status
from relibra_jax.suggestions import suggest_names

PROGRAM: Final = "relibra"

COMMANDS: Final[dict[str, tuple[type, Callable[[Any, Console], None]]]] = {
    "compare": (Compare, run_compare),
    "plan": (MakePlan, run_plan),
    "inspect": (Inspect, run_inspect),
    "advise": (Advise, run_advise),
    "claims": (Claims, run_claims),
    "deploy": (Deploy, run_deploy),
    "multiplex": (Multiplex, run_multiplex),
}
"""The options of each command, whose docstring is its help, and the function that runs it with them."""


def run_command(args: list[str]) -> int:
    """Run one command; bad input ends with one line on standard error, and nothing half-written is left behind.

    Args:
        args: the command and its options.

    Returns:
        The exit status: 0, or 2 for bad input.

    Raises:
        SystemExit: if help was asked for.
    """
    return exit_status(lambda: _run(args))


def _run(args: list[str]) -> None:
    name, *rest = args or [""]
    if not name.startswith("-") and name not in COMMANDS:
        hint = suggest_names(name, COMMANDS)
        raise ValueError(f"command {name!r} must be one of {', '.join(COMMANDS)}{hint}")
    if name in COMMANDS and not HELP & set(rest):
        # Parsed alone, a command's options are the only ones that an error suggests.
        of_command = functools.partial(tyro.cli, COMMANDS[name][0], prog=f"{PROGRAM} {name}")
        options = parse_options(of_command, rest)
    else:
        types = {name: options for name, (options, _) in COMMANDS.items()}
        of_all = functools.partial(
            tyro.extras.subcommand_cli_from_dict, types, prog=PROGRAM, description=_DESCRIPTION
        )
        options = parse_options(of_all, args)
    dict(COMMANDS.values())[type(options)](options, Console())


_DESCRIPTION = (
    "Expert load balancing as planning, for reinforcement learning of mixture-of-experts models: planners compared"
    " on recorded routing, plans as files, traces described, strategies advised, claims checked, rollout deployments"
    " sized, jobs grouped to share a cluster. Training runs are python -m experiments.run NAME."
)
