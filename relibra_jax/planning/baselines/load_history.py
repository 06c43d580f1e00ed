"""The loads that a planner may know when it decides: the true ones, which routing replay gives, or only past ones.

Systems without replay place and copy experts by the loads of earlier batches. `known_loads` lets the same
planner run on either, so that the worth of foresight can be measured.
"""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Num

from relibra_jax.types import Topology

LOADS: Final = ("true", "history")
SCOPES: Final = ("batch", "micro_batch")


class LoadHistory(NamedTuple):
    """State of the planners that can look back: what the batch before looked like."""

    batch: Float[jax.Array, "L E"]
    """Load of the last batch, summed over its micro-batches; zeros before the first."""
    micro_batch: Float[jax.Array, "L E"]
    """Load of its last micro-batch."""


def init_history(topology: Topology, num_layers: int, *, key: jax.Array | None = None) -> LoadHistory:
    """The state before the first batch: no load seen yet."""
    del key
    nothing = jnp.zeros((num_layers, topology.num_experts), jnp.float32)
    return LoadHistory(nothing, nothing)


def known_loads(
    load: Num[jax.Array, "M L E"], history: LoadHistory, *, loads: str, scope: str
) -> tuple[Float[jax.Array, "L E"], Float[jax.Array, "#M L E"], LoadHistory]:
    """What a planner may know when it decides: for homes, for the replicas of each micro-batch, and from now on.

    With ``history`` a batch is planned from the batch before, a micro-batch from the micro-batch before.
    """
    load = load.astype(jnp.float32)
    total = load.sum(0)
    seen = LoadHistory(total, load[-1])
    for_homes = total if loads == "true" else history.batch
    if scope == "batch":
        return for_homes, for_homes[None], seen
    earlier = jnp.concatenate([history.micro_batch[None], load[:-1]])
    return for_homes, load if loads == "true" else earlier, seen


def check_known(loads: str, scope: str) -> None:
    """Raise unless both options of `known_loads` are among their names."""
    for name, value, options in (("loads", loads, LOADS), ("scope", scope, SCOPES)):
        if value not in options:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(options)}")
