"""The state that a balancer keeps from batch to batch, as host arrays that a checkpoint saves and restores."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree

from relibra_jax.routing.resident_push import PushSizes
from relibra_jax.routing.sizes import Capacities, ExchangeSizes


class BalancerState(NamedTuple):
    """The state that the next batch depends on, as host arrays and numbers, for checkpoints."""

    planner: PyTree
    """The planner's state, with random keys stored as their key data."""
    key: Int[np.ndarray, "..."]
    """The key data of the random key for sample assignments."""
    home: Int[np.ndarray, "L E"]
    """Flat home slot of each expert after the last batch."""
    capacities: dict[str, Capacities]
    """Buffer sizes of the batches so far, by the shape of their stages: ``4x64`` for 4 micro-batches of 64 rows."""


def check_state(own: BalancerState, state: BalancerState, first: Capacities) -> None:
    """Raise if a balancer cannot continue from ``state``.

    Args:
        own: the balancer's own state, which has the expected structure and shapes.
        state: the state to check.
        first: the balancer's initial buffer sizes, which have the expected structure of all buffer sizes.

    Raises:
        ValueError: if ``state`` belongs to another planner or to a different number of layers or experts.
    """
    expected = own._replace(capacities=dict.fromkeys(state.capacities, first))
    for name, own_part, state_part in zip(own._fields, expected, state, strict=True):
        if _shapes(own_part) != _shapes(state_part):
            raise ValueError(
                f"balancer state, {name}: expected {_shapes(own_part)}, found {_shapes(state_part)}"
            )


NO_EXCHANGE = ExchangeSizes(pair=0, own=0, send=0, receive=0)
"""The sizes of an exchange that does not run."""


def zero_capacities(*, counts_visits: bool) -> Capacities:
    """Return buffer sizes of zero, for the time before the first batch.

    Args:
        counts_visits: whether the balancer counts the tokens that each node receives, as hierarchical dispatch needs.
    """
    return Capacities(
        rows=0,
        flat=NO_EXCHANGE,
        node=NO_EXCHANGE if counts_visits else None,
        local=NO_EXCHANGE,
        exports=0,
        export_copies=0,
        push=PushSizes(exports=0, pair=0, own=0),
    )


def capacities_from_names(names: Iterable[str]) -> dict[str, Capacities]:
    """Return buffer sizes of zero by stage shape, with the structure that their names in a checkpoint describe.

    >>> sizes = capacities_from_names(["4x64.rows", "4x64.flat.pair", "4x64.push.own"])
    >>> list(sizes), sizes["4x64"].rows, sizes["4x64"].node
    (['4x64'], 0, None)
    """
    parts_by_shape: dict[str, set[str]] = {}
    for shape, part in (name.split(".")[:2] for name in names):
        parts_by_shape.setdefault(shape, set()).add(part)
    return {
        shape: dataclasses.replace(
            zero_capacities(counts_visits="node" in parts),
            push=PushSizes(exports=0, pair=0, own=0) if "push" in parts else None,
        )
        for shape, parts in parts_by_shape.items()
    }


def _shapes(tree: PyTree) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *map(np.shape, leaves)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_host(leaf: Any) -> np.ndarray:
    """Copy a leaf of a planner's state to the host; a random key becomes its key data."""
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def from_host(value: Any, like: Any) -> jax.Array:
    """Convert a host array back to a leaf of a planner's state; the inverse of `to_host`.

    The result is not committed to a device, because planning runs on one device and training steps on all.

    Args:
        value: the host array, or the key data of a random key.
        like: the current leaf, which tells random keys from arrays.
    """
    value = jnp.asarray(value)
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(like)) if _is_key(like) else value
