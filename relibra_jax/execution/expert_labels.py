"""Labels for the leaves of a tree that hold experts, with their layers; the caller gives them, and nothing is guessed.

Parameters and optimizer state have one tree of labels each. The caller writes the labels of the parameters. Those of
the optimizer state follow from them, because the optimizer knows which of its leaves belong to which parameter.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import jax
import optax  # type: ignore[import-untyped]
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from relibra_jax.contract.types import Topology
from relibra_jax.execution.mesh import RANKS, check_mesh

type Layers = int | range | None
"""The label of a leaf: the layer of its experts as an int for ``[N, G, H, ...]``, a range of layers for a stacked
``[L, N, G, H, ...]``, or None for a leaf without experts."""


class ExpertLeaf(NamedTuple):
    """A leaf with its path and its label."""

    path: tuple[Any, ...]
    array: Any
    layers: Layers

    @property
    def stacked(self) -> bool:
        """Whether the leaf has a leading dimension of layers."""
        return isinstance(self.layers, range)

    @property
    def layer_numbers(self) -> Sequence[int]:
        """The layers of the leaf in order; empty for a leaf without experts."""
        if isinstance(self.layers, range):
            return self.layers
        return () if self.layers is None else (self.layers,)


def optimizer_layers(tx: Any, opt_state: PyTree, layers: PyTree) -> PyTree:
    """Derive the labels of an optimizer state from the labels of the parameters.

    `optax.tree_map_params` finds the leaves of the state that belong to a parameter. All other leaves get None. The
    state must have the structure that ``tx.init`` builds; with Flax it is ``nnx.Optimizer(...).opt_state``.

    Args:
        tx: an optax transformation. It may be chained, masked, have injected hyperparameters, or be `optax.MultiSteps`.
        opt_state: the state of ``tx``.
        layers: the labels of the parameters, as `migrate_experts` takes them.

    Returns:
        A tree like ``opt_state`` with a label at every leaf. State with a different shape than its parameter (factored
        moments) gets a label too; `migrate_experts` rejects it if its layout differs.

    Raises:
        TypeError: if ``tx`` is not a transformation.
        ValueError: if ``opt_state`` is not a state of it, a parameter in the state has no label, or optax cannot tell
            which leaves belong to which parameter (`optax.lbfgs`).

    >>> import jax.numpy as jnp
    >>> params = {"experts": jnp.zeros((1, 1, 3)), "router": jnp.zeros(4)}
    >>> tx = optax.adam(1e-3)
    >>> optimizer_layers(tx, tx.init(params), {"experts": 0, "router": None})[0].mu
    {'experts': 0, 'router': None}
    """
    if not callable(getattr(tx, "init", None)):
        raise TypeError(f"tx must be an optax transformation, found {type(tx).__name__}")
    labels = _labels(layers)

    def label(parameters):
        return jax.tree.map_with_path(lambda path, _: labels[_labelled_prefix(path, labels)], parameters)

    try:
        return optax.tree_map_params(
            tx, label, opt_state, transform_non_params=lambda _: None, is_leaf=lambda _: True
        )
    except ValueError as error:
        if "pytree structure" not in str(error):
            raise
        raise ValueError(f"opt_state: a {type(opt_state).__name__} is not a state that tx builds") from error
    # An init that does not expect optax's placeholders for parameters may raise any of these.
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        experts = [leaf_name(path) for path, layer in labels.items() if layer is not None]
        names = [leaf_name(path) for path, _ in jax.tree.leaves_with_path(opt_state)]
        suspects = [name for name in names if any(expert in name for expert in experts)]
        kinds = ", ".join(type(part).__name__ for part in jax.tree.leaves(opt_state, is_leaf=_is_state))
        raise ValueError(
            f"optimizer state{suspects[0] if suspects else ''} of {kinds}: optax.tree_map_params cannot tell which"
            f" leaves belong to which parameter ({error!r}), so they cannot move with their experts; use another"
            " optimizer"
        ) from error


def _is_state(part: Any) -> bool:
    """Return whether ``part`` is the state of one transformation, which is a NamedTuple in optax."""
    return hasattr(part, "_fields")


def expert_leaves(
    tree: PyTree, layers: PyTree, *, num_layers: int, mesh: Mesh, topology: Topology
) -> list[ExpertLeaf]:
    """List all leaves of ``tree`` in order with their labels, and check that the leaves with experts can move.

    Args:
        tree: any tree of arrays.
        layers: the layer of each leaf, a prefix of ``tree``, as for `migrate_experts`.
        num_layers: L, the number of layers of the homes.
        mesh: the device mesh, with the axes node and local.
        topology: the expert-parallel group.

    Raises:
        ValueError: if the mesh does not fit the topology, or a leaf has no label or a different layout.
    """
    check_mesh(mesh, topology)
    leaves = labelled_leaves(tree, layers)
    for leaf in leaves:
        if leaf.layers is not None:
            _check_leaf(leaf, num_layers, mesh, topology)
    return leaves


def labelled_leaves(tree: PyTree, layers: PyTree) -> list[ExpertLeaf]:
    """List all leaves of ``tree`` in order with their labels.

    Args:
        tree: any tree of arrays.
        layers: the layer of each leaf, a prefix of ``tree``, as for `migrate_experts`.

    Raises:
        ValueError: if a leaf has no label, or a label has no leaf.
    """
    labels, prefixes, leaves = _labels(layers), set(), []
    for path, array in jax.tree.leaves_with_path(tree):
        prefix = _labelled_prefix(path, labels)
        prefixes.add(prefix)
        leaves.append(ExpertLeaf(path, array, labels[prefix]))
    for path, label in labels.items():
        if label is not None and path not in prefixes:
            raise ValueError(f"layers{leaf_name(path)} = {label} belongs to no leaf of the tree")
    return leaves


def _labels(layers: PyTree) -> dict[tuple[Any, ...], Layers]:
    labels = dict(jax.tree.leaves_with_path(layers, is_leaf=lambda label: label is None))
    for path, label in labels.items():
        if isinstance(label, bool) or not isinstance(label, Integral | range | None):
            raise ValueError(f"layers{leaf_name(path)}: expected an int, a range or None, found {label!r}")
    return labels


def _labelled_prefix(path: tuple[Any, ...], labels: dict[tuple[Any, ...], Layers]) -> tuple[Any, ...]:
    """Return the start of ``path`` that has a label.

    Labels are matched by paths and not by tree types, so that the labels of one Flax state fit another with its paths.
    """
    for end in range(len(path) + 1):
        if path[:end] in labels:
            return path[:end]
    raise ValueError(
        f"tree{leaf_name(path)} has no label in layers: add one, None for a leaf without experts"
    )


def _check_leaf(leaf: ExpertLeaf, num_layers: int, mesh: Mesh, topology: Topology) -> None:
    where, array = f"tree{leaf_name(leaf.path)}", leaf.array
    for layer in leaf.layer_numbers:
        if not 0 <= layer < num_layers:
            raise ValueError(f"{where}: layer {layer} is outside the {num_layers} layers of the homes")
    if not isinstance(array, jax.Array | jax.ShapeDtypeStruct):
        raise ValueError(
            f"{where}: expected an array over the ranks of the mesh, found {type(array).__name__}"
        )
    ranks = (topology.num_nodes, topology.ranks_per_node, topology.home_slots)
    lead = (len(leaf.layer_numbers),) * leaf.stacked + ranks
    if array.shape[: len(lead)] != lead:
        names = "[layers, N, G, H, ...]" if leaf.stacked else "[N, G, H, ...]"
        expected = ", ".join(map(str, lead))
        raise ValueError(f"{where}: expected {names} = [{expected}, ...], found {list(array.shape)}")
    sharding: Any = array.sharding
    on_mesh = isinstance(sharding, NamedSharding) and sharding.mesh == mesh
    actual = sharding if on_mesh else NamedSharding(mesh, PartitionSpec())
    expected_sharding = actual.update(spec=slot_spec(actual, stacked=leaf.stacked))
    if not on_mesh or not expected_sharding.is_equivalent_to(actual, len(array.shape)):
        raise ValueError(
            f"{where}: expected a sharding {expected_sharding.spec} over the mesh, found {sharding}"
        )


def slot_spec(sharding: NamedSharding, *, stacked: bool) -> PartitionSpec:
    """Return the sharding spec of an expert leaf: node and local, even if they have size 1, and its other axes."""
    return PartitionSpec(*(None,) * stacked, *RANKS, None, *sharding.spec[stacked + 3 :])


def leaf_name(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf in error messages."""
    return jax.tree_util.keystr(path)
