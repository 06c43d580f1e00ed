"""Where the time of an update goes on a rank, from a profile of JAX."""

import collections
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import jax

PHASES: Final = ("push_residents", "replica_fetch", "dispatch", "experts", "combine", "return_gradients")
"""The scopes of execution that are phases."""
SUMS, REST = "sums of gradients", "attention and rest"
"""The phases without a scope: collectives, and computation."""
_OPERATION: Final = re.compile(r"%?([\w.-]+) = .*op_name=\"([^\"]*)\"")
_COLLECTIVE: Final = re.compile(r"all-to-all|all-reduce|all-gather|collective-permute|reduce-scatter")
_CONTAINER: Final = re.compile(r"while|conditional|call")
"""Operations that contain others."""


def scopes_of(program: str) -> dict[str, str]:
    """Return the scope of each operation of a compiled program, by name.

    Args:
        program: the text of the program.

    >>> scopes_of('  %add.3 = f32[] add(%a, %b), metadata={op_name="jit(f)/experts/add"}')
    {'add.3': 'jit(f)/experts/add'}
    """
    return dict(_OPERATION.findall(program))


def seconds_by_phase(run: Callable[[], Any], scopes: Mapping[str, str]) -> dict[str, float]:
    """Profile one run of a program on this rank.

    Args:
        run: the function that runs it.
        scopes: the scope of each operation of the program, by name.

    Returns:
        The seconds in which any operation of a phase ran, its waits for other ranks included. Phases may overlap.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        spans = collections.defaultdict(list)
        for plane in profile.planes:
            for line in plane.lines:
                for event in line.events:
                    operation = str(dict(event.stats).get("hlo_op", ""))
                    if operation and not _CONTAINER.match(operation):
                        spans[phase_of(operation, scopes)].append((event.start_ns, event.end_ns))
    return {phase: covered(each) / 1e9 for phase, each in spans.items()}


def phase_of(operation: str, scopes: Mapping[str, str]) -> str:
    """Return the phase of an operation.

    Args:
        operation: the name of the operation.
        scopes: the scopes of operations, by name.

    >>> phase_of("all-to-all.3", {"all-to-all.3": "jit(update)/while/body/dispatch/all_to_all"})
    'dispatch'
    >>> phase_of("all-reduce.1", {})
    'sums of gradients'
    """
    rest = SUMS if _COLLECTIVE.match(operation) else REST
    return scope_phase(scopes.get(operation, "")) or rest


def scope_phase(scope: str) -> str | None:
    """Return the phase in a scope, or None if there is none.

    >>> scope_phase("jit(update)/while/body/dispatch/all_to_all"), scope_phase("jit(update)/add")
    ('dispatch', None)
    """
    return next((phase for phase in PHASES if re.search(rf"\b{phase}\b", scope)), None)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for begin, after in sorted(spans):
        if after > end:
            total += after - max(begin, end)
            end = after
    return total
