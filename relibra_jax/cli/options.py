"""The trace argument that all commands share."""

from typing import Annotated

import tyro

TraceName = Annotated[
    str | None,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="TRACE",
        help_behavior_hint="(default: $RELIBRA_TRACE, else the recorded trace of the package)",
    ),
]
"""The trace argument of a command: a name or a path, as `relibra_jax.traces.read.read_trace` takes it."""
