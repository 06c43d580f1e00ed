"""MaxText's experts in the order of a plan's homes, from outside: pure functions of its parameters and optimizer state.

MaxText replays routes with ``forced_routed_experts``, which names positions along the expert axis of its weights; that
axis is sharded over the mesh in contiguous blocks. So `reorder_experts` takes the weights, and all that an optimizer
keeps of their shape, in the order of the plan's homes, and `relibra_jax.integrations.expert_order.map_ids` writes the
routes in it. Replicas have no place in MaxText.

Names and shapes are those of MaxText 0.2.5, of the decoder blocks that replay routes there: MIXTRAL and QWEN3_5,
scanned or not, and GEMMA4, not scanned (``layers/moe.py``, ``models/``). A leaf of any other MoE block is an error, not
a guess.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Num, PyTree, Shaped

from relibra_jax.integrations.expert_order import source_positions
from relibra_jax.types import Array

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
"""The axes of each leaf of a MoE block, of one layer. Scanned layers have a further axis."""

_LAYOUTS: Final = re.compile(
    r"(?:.*/)?decoder/(?:"
    r"layers_(?P<layer>\d+)/(?:MoeBlock_0|mlp/routed_experts|mlp/moe_block/MoeBlock_0)"
    r"|layers/(?:MoeBlock_0|layer_(?P<step>\d+)/mlp/routed_experts)"
    r")/(?P<leaf>.+)"
)
_BLOCK: Final = re.compile(r"(?:.*/)?(?:MoeBlock_0|routed_experts)/(?!rngs/).+")
"""Whatever lies in a MoE block, random keys aside."""
_LEAF: Final = re.compile(rf"(?:.*/)?(?:{'|'.join(AXES)}|gate/[^/]+)")
"""Whatever is called like a leaf of one. Dense layers have ``wi_0/kernel``."""


class _ExpertLeaf(NamedTuple):
    """Where the experts of a leaf are."""

    expert_axis: int
    layer_axis: int | None
    """None for a leaf of one layer."""
    layers: range
    """The decoder layer of each entry along the layer axis, or the one layer."""


def reorder_experts(
    tree: PyTree, before: Num[Array, "..."], after: Num[Array, "..."], *, scan_axis: int = 1
) -> PyTree:
    """Take MaxText's experts in the order of the homes ``after``: weights, gate, biases, and what an optimizer keeps.

    A leaf belongs to a parameter if its path ends with that of the parameter, as in the states of optax and Flax:
    moments, averages, accumulated gradients. Bits stay. Outside jit, shardings stay too, homes are data to what is
    compiled, and each device holds one layer of one leaf whole for a moment. Inside jit, name ``out_shardings``, and
    donate ``tree`` if old and new do not fit in memory together.

    Args:
        tree: parameters, optimizer state or both, or gradients: any tree of arrays with MaxText's names, such as
            ``nnx.state((model, optimizer))``.
        before: ``[L, E]``, the position of each expert so far, a row for each decoder layer;
            `relibra_jax.integrations.expert_order.logical_order` if the model was never reordered.
        after: ``[L, E]``, the position of each expert from now on, ``Plan.home``.
        scan_axis: MaxText's ``param_scan_axis``, 0 or 1: where scanned layers are stacked.

    Returns:
        ``tree`` with its experts in the new order; all other leaves are the same arrays.

    Raises:
        ValueError: if homes are no permutations, a leaf that looks like an expert's is in no known place or has another
            shape, or a layer of the homes has no experts in the tree: the first one, by its name.

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
    found: set[int] = set()
    moved = []
    for name, (_, array) in zip(names, leaves, strict=True):
        place = _expert_leaf(name, np.shape(array), source.shape, steps, scan_axis)
        if place is None:
            moved.append(array)
        else:
            found |= set(place.layers)
            moved.append(_reorder(array, source[np.asarray(place.layers)], place))
    missing = sorted(set(range(len(source))) - found)
    if missing:
        raise ValueError(
            f"homes of {len(source)} layers, but the tree has no experts of layer {missing[0]} under decoder/layers"
        )
    return jax.tree.unflatten(structure, moved)


def _leaf_name(path: tuple[Any, ...]) -> str:
    """The keys of a path, ``decoder/layers/MoeBlock_0/wi_0``, without the box that Flax puts around an array."""
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    boxed = names and isinstance(path[-1], jax.tree_util.GetAttrKey) and names[-1] == "value"
    return "/".join(names[:-1] if boxed else names)


def _expert_leaf(
    name: str, shape: tuple[int, ...], homes: tuple[int, ...], steps: set[int], scan_axis: int
) -> _ExpertLeaf | None:
    """Where the experts of a leaf are, or None if it has none; ``steps`` are the layers of a scanned block."""
    match = _LAYOUTS.fullmatch(name)
    axes = AXES.get(match["leaf"], "").split() if match else []
    if match is None or not axes:
        if _BLOCK.fullmatch(name) or _LEAF.fullmatch(name):
            raise ValueError(
                f"{name} {list(shape)}: looks like experts, but MaxText 0.2.5 has no such leaf where it replays routes"
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
            raise ValueError(f"{name}: blocks of {cycle} layers, but homes of {num_layers} layers")
    sizes = dict(zip(axes, shape, strict=False))
    expected = {"E": num_experts} | ({} if layer_axis is None else {"L": len(layers)})
    if len(shape) != len(axes) or any(sizes[axis] != size for axis, size in expected.items()):
        wanted = ", ".join(f"{axis}={expected[axis]}" if axis in expected else axis for axis in axes)
        raise ValueError(f"{name}: expected [{wanted}], found {list(shape)}")
    if layers[-1] >= num_layers:
        raise ValueError(f"{name}: homes have {num_layers} layers")
    return _ExpertLeaf(axes.index("E"), layer_axis, layers)


def _reorder(array: Any, source: Any, place: _ExpertLeaf) -> Any:
    """One leaf in the new order; ``source`` has a row for each of its layers."""
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
    """The jitted function that takes a leaf in the order of ``source``, which is data to it.

    Layers go one at a time: XLA gathers the experts of all ranks to take them in another order, which for all layers
    of a stack at once would be the whole leaf on every device.
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
