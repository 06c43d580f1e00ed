"""What a balancer keeps from batch to batch, as host arrays that a checkpoint saves and restores."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree

from relibra_jax.capacity import Capacities, ExchangeSizes
from relibra_jax.resident_push import PushSizes


class BalancerState(NamedTuple):
    """What one batch leaves to the next: host arrays and numbers, for checkpoints."""

    planner: PyTree
    """The planner's state; random keys as their data."""
    key: Int[np.ndarray, "..."]
    """The data of the random key from which assignments are drawn."""
    home: Int[np.ndarray, "L E"]
    """Flat home slot of each expert, since the last batch."""
    capacities: dict[str, Capacities]
    """Buffer sizes of the batches so far, by the shape of their stages: ``4x64`` for 4 micro-batches of 64 rows."""


def check_state(own: BalancerState, given: BalancerState, first: Capacities) -> None:
    """Raise unless ``given`` has the structure and shapes of ``own``, and its buffer sizes those of ``first``.

    Raises:
        ValueError: if it is the state of another planner, or of another number of layers or experts.
    """
    expected = own._replace(capacities=dict.fromkeys(given.capacities, first))
    for name, mine, other in zip(own._fields, expected, given, strict=True):
        if _shapes(mine) != _shapes(other):
            raise ValueError(f"balancer state, {name}: expected {_shapes(mine)}, found {_shapes(other)}")


NOTHING = ExchangeSizes(pair=0, own=0, send=0, receive=0)
"""The sizes of an exchange that is not run."""


def no_capacities(*, counts_visits: bool) -> Capacities:
    """The buffer sizes before the first batch."""
    return Capacities(
        rows=0,
        flat=NOTHING,
        node=NOTHING if counts_visits else None,
        local=NOTHING,
        exports=0,
        export_copies=0,
        push=PushSizes(exports=0, pair=0, own=0),
    )


def capacities_named(names: Iterable[str]) -> dict[str, Capacities]:
    """Sizes of zero by shape, of the structure that their names in a checkpoint tell.

    >>> sizes = capacities_named(["4x64.rows", "4x64.flat.pair", "4x64.push.own"])
    >>> list(sizes), sizes["4x64"].rows, sizes["4x64"].node
    (['4x64'], 0, None)
    """
    found: dict[str, set[str]] = {}
    for shape, part in (name.split(".")[:2] for name in names):
        found.setdefault(shape, set()).add(part)
    return {
        shape: dataclasses.replace(
            no_capacities(counts_visits="node" in parts),
            push=PushSizes(exports=0, pair=0, own=0) if "push" in parts else None,
        )
        for shape, parts in found.items()
    }


def _shapes(tree: PyTree) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *map(np.shape, leaves)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_host(leaf: Any) -> np.ndarray:
    """A leaf of a planner's state as a host array, a random key as its data."""
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def from_host(value: Any, like: Any) -> jax.Array:
    """The way back, bound to no device: planning runs on one device, steps on all."""
    value = jnp.asarray(value)
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(like)) if _is_key(like) else value
