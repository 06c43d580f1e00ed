"""What the programs of this folder share: arguments of traces and ranks, the console, and the parsing of options."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import tyro
from rich.console import Console

from relibra_jax.contract.types import Topology
from relibra_jax.support.bad_input import exit_status
from relibra_jax.support.parsing import parse_options
from relibra_jax.support.programs import keep_programs_unless

TraceName = Annotated[
    str | None,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="TRACE",
        help_behavior_hint="(default: $RELIBRA_TRACE, else the recorded trace of the package)",
    ),
]
"""The trace argument of a program: a name or a path, as `relibra_jax.traces.read.read_trace` takes it."""


def parse_ranks(ranks: str) -> tuple[int, int]:
    """Return the numbers of nodes and of local ranks in an option such as ``2x4``.

    Raises:
        ValueError: if the text does not have this form.

    >>> parse_ranks("2x8")
    (2, 8)
    """
    numbers = ranks.split("x")
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"ranks={ranks!r} must be nodes x local ranks, for example 2x4")
    return int(numbers[0]), int(numbers[1])


def topology_of(ranks: str, num_experts: int, *, replica_slots: int, resident_slots: int = 0) -> Topology:
    """Return the expert-parallel group of the ranks in an option.

    Args:
        ranks: nodes x local ranks, for example ``2x4``.
        num_experts: the number of logical experts of a layer.
        replica_slots: the number of replica slots of a rank.
        resident_slots: the number of resident slots of a rank.

    Raises:
        ValueError: if ``ranks`` does not have this form, or `Topology` rejects the numbers.

    >>> topology_of("2x8", 64, replica_slots=1).num_ranks
    16
    """
    nodes, local = parse_ranks(ranks)
    return Topology(
        num_nodes=nodes,
        ranks_per_node=local,
        num_experts=num_experts,
        replica_slots=replica_slots,
        resident_slots=resident_slots,
    )


def wide_console() -> Console:
    """Make a console of the terminal's width; of 150 columns if the output goes to a file."""
    return Console(width=None if sys.stdout.isatty() else 150)


def run_program(
    main: Callable[[Any], int | None], options: Any, args: Sequence[str] | None = None, **about: Any
) -> int:
    """Parse options and run a program with them. Compiled programs are kept for later runs (`keep_programs`).

    Args:
        main: the program, a function that takes the parsed options.
        options: the type of the options, as `tyro.cli` takes it.
        args: the options, as strings of the command line. With None, the arguments of the process are used.
        **about: additional arguments of `tyro.cli`, for example ``description``. ``prog`` is by default the command
            ``python -m MODULE`` that started the process.

    Returns:
        The exit status, as `exit_status` returns it.
    """
    module = getattr(sys.modules["__main__"].__spec__, "name", None)
    if module is not None:
        about = {"prog": f"python -m {module.removesuffix('.__main__')}", **about}
    parse = functools.partial(tyro.cli, options, **about)
    arguments = list(sys.argv[1:] if args is None else args)
    return exit_status(lambda: main(parse_options(parse, keep_programs_unless(arguments))))
