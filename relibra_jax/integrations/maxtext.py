"""Reordering of MaxText's experts to the homes of a plan, by pure functions on its parameters and optimizer state.

MaxText replays routes with ``forced_routed_experts``, which contains positions along the expert axis of its weights.
That axis is sharded over the mesh in contiguous blocks. So `reorder_experts` puts the weights, and all optimizer state
of their shape, into the order of the plan's homes, and `relibra_jax.integrations.expert_order.map_ids` translates the
routes to that order. MaxText itself is not changed, and it does not support replicas.

The names and shapes are those of MaxText 0.2.5, for the decoder blocks that can replay routes: MIXTRAL and QWEN3_5,
scanned or not, and GEMMA4, not scanned (``layers/moe.py``, ``models/``). A leaf of any other MoE block raises an error.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Num, PyTree, Shaped

from relibra_jax.contract.types import Array
from relibra_jax.integrations.expert_order import source_positions

AXES: Final = {
    "gate/kernel": "D E",
    "gate/bias": "E",
    "per_expert_scale": "E",
    "wi": "E D 2F",
    "wi_0": "E D F",
    "wi_1": "E D F",
    "wo": "E F D",
    "wi_0_bias": "E F",
    "wi_1_bias": "E F",
    "wo_bias": "E D",
}
"""The axes of each leaf of a MoE block of one layer. Scanned layers have an additional axis."""

_LAYOUTS: Final = re.compile(
    r"(?:.*/)?decoder/(?:"
    r"layers_(?P<layer>\d+)/(?:MoeBlock_0|mlp/routed_experts|mlp/moe_block/MoeBlock_0)"
    r"|layers/(?:MoeBlock_0|layer_(?P<step>\d+)/mlp/routed_experts)"
    r")/(?P<leaf>.+)"
)
_BLOCK: Final = re.compile(r"(?:.*/)?(?:MoeBlock_0|routed_experts)/(?!rngs/).+")
"""The names of all leaves in a MoE block, except random keys."""
_LEAF: Final = re.compile(rf"(?:.*/)?(?:{'|'.join(AXES)}|gate/[^/]+)")
"""The names that look like a leaf of a MoE block. The leaves of dense layers differ: ``wi_0/kernel``."""


class _ExpertLeaf(NamedTuple):
    """The location of the experts in a leaf."""

    expert_axis: int
    layer_axis: int | None
    """The axis of scanned layers; None for a leaf of one layer."""
    layers: range
    """The decoder layer of each entry along the layer axis, or the only layer."""


def reorder_experts(
    tree: PyTree, before: Num[Array, "..."], after: Num[Array, "..."], *, scan_axis: int = 1
) -> PyTree:
    """Reorder MaxText's experts from the homes ``before`` to the homes ``after``.

    This reorders weights, gate, biases, and the optimizer state that belongs to them: moments, averages and accumulated
    gradients, as in the states of optax and Flax. A leaf belongs to a parameter if its path ends with the path of the
    parameter. Values keep their exact bits.

    Outside `jax.jit`, arrays keep their shardings, new homes do not cause a recompilation, and each device temporarily
    holds one whole layer of one leaf. Inside `jax.jit`, set ``out_shardings``, and donate ``tree`` if the old and the
    new arrays do not fit into memory together.

    Args:
        tree: parameters, optimizer state, gradients, or a combination: any tree of arrays with MaxText's names, such as
            ``nnx.state((model, optimizer))``.
        before: the position of each expert before the reorder, ``[L, E]``, with one row for each decoder layer;
            `relibra_jax.integrations.expert_order.logical_order` if the model was never reordered.
        after: the position of each expert after the reorder, ``[L, E]``, for example ``Plan.home``.
        scan_axis: MaxText's ``param_scan_axis``, the axis along which scanned layers are stacked, 0 or 1.

    Returns:
        The tree with its experts in the new order. All other leaves are the same arrays.

    Raises:
        ValueError: if ``scan_axis`` is not 0 or 1, if a row of the homes is not a permutation, if a leaf looks like
            expert weights but has an unknown name or an unexpected shape, or if the tree has no experts for a layer of
            the homes. The message names the first such leaf or layer.

    >>> block = {"wo_bias": np.array([[5], [6], [7]]), "gate": {"kernel": np.array([[1, 2, 3]])}}
    >>> tree = {"decoder": {"layers_0": {"MoeBlock_0": block}}}
    >>> tree = reorder_experts(tree, np.array([[0, 1, 2]]), np.array([[2, 0, 1]]))
    >>> [leaf.tolist() for leaf in jax.tree.leaves(tree)]
    [[[2, 3, 1]], [[6], [7], [5]]]
    """
    if scan_axis not in (0, 1):
        raise ValueError(f"scan_axis={scan_axis}: expected 0 or 1, MaxText's param_scan_axis")
    source = source_positions(before, after)
    leaves, structure = jax.tree.flatten_with_path(tree)
    names = [_leaf_name(path) for path, _ in leaves]
    steps = {int(match["step"]) for match in map(_LAYOUTS.fullmatch, names) if match and match["step"]}
    expert_layers: set[int] = set()
    new_leaves = []
    for name, (_, array) in zip(names, leaves, strict=True):
        place = _expert_leaf(name, np.shape(array), source.shape, steps, scan_axis)
        if place is None:
            new_leaves.append(array)
        else:
            expert_layers |= set(place.layers)
            new_leaves.append(_reorder(array, source[np.asarray(place.layers)], place))
    missing = sorted(set(range(len(source))) - expert_layers)
    if missing:
        raise ValueError(
            f"the homes have {len(source)} layers, but the tree has no experts of layer {missing[0]} under"
            " decoder/layers"
        )
    return jax.tree.unflatten(structure, new_leaves)


def _leaf_name(path: tuple[Any, ...]) -> str:
    """Return a path as text, ``decoder/layers/MoeBlock_0/wi_0``, without the key of Flax's box around an array."""
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    has_box = names and isinstance(path[-1], jax.tree_util.GetAttrKey) and names[-1] == "value"
    return "/".join(names[:-1] if has_box else names)


def _expert_leaf(
    name: str, shape: tuple[int, ...], homes: tuple[int, ...], steps: set[int], scan_axis: int
) -> _ExpertLeaf | None:
    """Return the location of the experts in a leaf, or None if it has none.

    ``steps`` are the layer indices that occur inside a scanned block of several layers.
    """
    match = _LAYOUTS.fullmatch(name)
    axes = AXES.get(match["leaf"], "").split() if match else []
    if match is None or not axes:
        if _BLOCK.fullmatch(name) or _LEAF.fullmatch(name):
            raise ValueError(
                f"{name} {list(shape)}: looks like expert weights, but is not a leaf of MaxText 0.2.5's blocks that"
                " can replay routes"
            )
        return None
    num_layers, num_experts = homes
    layer_axis = None
    if match["layer"] is not None:
        layers = range(int(match["layer"]), int(match["layer"]) + 1)
    else:
        cycle = max(steps) + 1 if match["step"] else 1
        layers = range(int(match["step"] or 0), num_layers, cycle)
        layer_axis = scan_axis
        axes.insert(scan_axis, "L")
        if num_layers % cycle:
            raise ValueError(
                f"{name}: a scanned block has {cycle} layers, which does not divide the {num_layers} layers of homes"
            )
    sizes = dict(zip(axes, shape, strict=False))
    expected = {"E": num_experts} | ({} if layer_axis is None else {"L": len(layers)})
    if len(shape) != len(axes) or any(sizes[axis] != size for axis, size in expected.items()):
        expected_shape = ", ".join(f"{axis}={expected[axis]}" if axis in expected else axis for axis in axes)
        raise ValueError(f"{name}: expected [{expected_shape}], found {list(shape)}")
    if layers[-1] >= num_layers:
        raise ValueError(f"{name}: layer {layers[-1]} is outside the homes, which have {num_layers} layers")
    return _ExpertLeaf(axes.index("E"), layer_axis, layers)


def _reorder(array: Any, source: Any, place: _ExpertLeaf) -> Any:
    """Return one leaf in the new order; ``source`` has one row for each of its layers."""
    if isinstance(array, np.ndarray) and isinstance(source, np.ndarray):
        return _reorder_on_host(array, source, place)
    sharding = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    return _compiled(sharding, place.expert_axis, place.layer_axis)(array, source)


def _reorder_on_host(
    array: Shaped[np.ndarray, "..."], source: Int[np.ndarray, "l E"], place: _ExpertLeaf
) -> Shaped[np.ndarray, "..."]:
    result = array.copy()
    rows = result[None] if place.layer_axis is None else np.moveaxis(result, place.layer_axis, 0)
    expert_axis = place.expert_axis - (place.layer_axis is not None and place.layer_axis < place.expert_axis)
    for row, order in zip(rows, source, strict=True):
        row[...] = row.take(order, axis=expert_axis)
    return result


@functools.cache
def _compiled(sharding: Any, expert_axis: int, layer_axis: int | None) -> Callable[..., jax.Array]:
    """Return the jitted function ``(array, source)`` that reorders a leaf.

    It reorders one layer at a time: XLA gathers the experts of all ranks on every device to reorder them, so all layers
    of a stack at once would need the whole leaf on every device.
    """

    def reorder(array, source):
        if layer_axis is None:
            return jnp.take(array, source[0], axis=expert_axis)

        def one_layer(layer, array):
            row = jax.lax.dynamic_slice_in_dim(array, layer, 1, layer_axis)
            row = jnp.take(row, source[layer], axis=expert_axis)
            return jax.lax.dynamic_update_slice_in_dim(array, row, layer, layer_axis)

        return jax.lax.fori_loop(0, len(source), one_layer, array)

    return jax.jit(reorder, out_shardings=sharding)
