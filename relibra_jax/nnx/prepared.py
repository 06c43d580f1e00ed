"""A prepared batch: what its steps need, for as long as the experts lie where it wants them."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree

from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.row_packing import RowLayout
from relibra_jax.types import EMPTY, Array, Assignment, BatchPlan


class RowPacking(NamedTuple):
    """Which token of a row is of which sample, where rows hold several samples one behind the other."""

    segments: Int[Array, "*M rows T"]
    """The sample of each token, its index in the batch; EMPTY at padding. Tokens attend to those of their sample."""
    positions: Int[Array, "*M rows T"]
    """The token's position in its sample."""


class PreparedBatch:
    """What `relibra_jax.nnx.Balancer.prepare` returns. Give it to jitted steps as it is.

    A pytree: the batch plan and what layers follow are its array part, `parallel` is static. Under jit the arrays are
    traced, so a compiled step serves every batch of the same sizes. Outside of jit it remembers which batch it is:
    given to a step after the experts moved on for another batch, it is refused.
    """

    parallel: ExpertParallel
    """Mesh, topology, buffer sizes and kinds of exchange, for `relibra_jax.nnx.MoELayer`."""
    plan_seconds: float
    """How long the host planned, and checked the plan; 0 under jit."""
    size_seconds: float
    """How long it counted the sizes of buffers; 0 under jit."""
    visits: Int[np.ndarray, "M L P N"] | None
    """Tokens that each rank sends to each node, its own among them, on the hierarchical path; None on the flat one, for
    live routing, and under jit."""
    check_in_force: Callable[[], None] | None
    """Raises when another batch has been prepared; None under jit."""

    def __init__(
        self,
        batch_plan: BatchPlan | None,
        parallel: ExpertParallel,
        *,
        layers: PreparedLayer | None = None,
        assignment: Assignment | None = None,
        num_samples: int = 0,
        num_tokens: int = 0,
        rows: RowLayout | None = None,
        seconds: tuple[float, float] = (0.0, 0.0),
        visits: Int[np.ndarray, "M L P N"] | None = None,
    ):
        self._batch_plan, self.parallel = batch_plan, parallel
        self.plan_seconds, self.size_seconds = seconds
        self.visits = visits
        self._rows, self._num_tokens = rows, num_tokens
        self._layers, self._assignment, self._num_samples = layers, assignment, num_samples
        self.check_in_force = None

    @property
    def batch_plan(self) -> BatchPlan:
        """Assignment, load and plan of all micro-batches, those of data-parallel copies among them, a copy at a time.

        Raises:
            ValueError: if the batch was prepared for live routing, which has no plan.
        """
        self._refuse_if_superseded()
        if self._batch_plan is None:
            raise ValueError("this batch was prepared for live routing, which has no plan")
        return self._batch_plan

    def layers(self) -> PreparedLayer | None:
        """What the layers of all micro-batches follow, stacked ``[M, L, *copies]``, to be scanned beside the rows of
        `to_ranks`; None for live routing. Residents' weights are not in it: they change with every update
        (`relibra_jax.nnx.accumulate_gradients`)."""
        self._refuse_if_superseded()
        return self._layers

    def micro_batch(self, index: Any) -> PreparedLayer | None:
        """What the layers of one micro-batch follow, stacked ``[L, *copies]``; None for live routing."""
        layers = self.layers()
        return None if layers is None else layers.layer(index)

    def to_ranks(self, samples: PyTree) -> PyTree:
        """Bring the batch's rows to the ranks that own them, micro-batch by micro-batch. Runs on the host.

        Args:
            samples: any tree of host arrays ``[B, ...]``, one row for each sample of the batch, the same on all
                processes: tokens, masks, weights, the replay itself. A stage of some samples takes the rows of these.

        Returns:
            The same tree of ``[M, rows, ...]`` arrays, ``rows`` sharded over the ranks; zeros (False) where a rank
            has room for a further sample. Where rows are packed, all are ``[M, rows, T, ...]``: arrays of tokens, those
            whose second axis is the replay's, have each token in its place; other arrays have at each token the value
            of its sample.

        Raises:
            ValueError: if an array has not one row a sample, or another batch has been prepared since.
        """
        places = self._places("to_ranks")
        sharding = NamedSharding(self.parallel.mesh, PartitionSpec(None, *self.parallel.token_spec))

        def move(path: Any, leaf: Any) -> jax.Array:
            samples = np.asarray(leaf)
            if samples.ndim < 1 or len(samples) != self._num_samples:
                name = f"samples{jax.tree_util.keystr(path)}"
                raise ValueError(
                    f"{name}: shape {samples.shape} for a batch of {self._num_samples} samples; give to_ranks the rows"
                    " of the batch that was prepared, in its order"
                )
            of_tokens = places.positions is not None and samples.shape[1:2] == (self._num_tokens,)
            sample = np.maximum(places.samples, 0)
            rows = samples[sample, places.positions] if of_tokens else samples[sample]
            rows[places.samples == EMPTY] = 0
            return _put(rows, sharding)

        return jax.tree.map_with_path(move, samples)

    def from_ranks(self, rows: PyTree) -> PyTree:
        """Bring what steps returned for the batch's rows back into the order of the batch. Runs on the host.

        On several processes, all call it, and all get all rows.

        Args:
            rows: any tree of arrays ``[M, rows, ...]``, in the places where `to_ranks` puts samples; of tokens,
                ``[M, rows, T, ...]``, where rows are packed.

        Returns:
            The same tree of host arrays ``[B, ...]``; zeros (False) for samples that are no part of this stage.

        Raises:
            ValueError: if an array is of other rows, or another batch has been prepared since.
        """
        samples, positions = self._places("from_ranks")
        held = samples != EMPTY

        def move(path: Any, leaf: Any) -> np.ndarray:
            if np.shape(leaf)[: samples.ndim] != samples.shape:
                name, axes = f"rows{jax.tree_util.keystr(path)}", "micro-batches and rows"
                raise ValueError(f"{name}: shape {np.shape(leaf)} for {samples.shape} {axes}")
            found = to_host(leaf)[held]
            shape = (self._num_samples,) if positions is None else (self._num_samples, self._num_tokens)
            batch = np.zeros((*shape, *found.shape[1:]), found.dtype)
            batch[samples[held] if positions is None else (samples[held], positions[held])] = found
            return batch

        return jax.tree.map_with_path(move, rows)

    @property
    def packing(self) -> RowPacking | None:
        """Which token of the ranks' rows is of which sample, ``[M, rows, T]`` as `to_ranks` puts them; None where a row
        is a sample. Give each micro-batch's to the model."""
        places = self._places("packing")
        if places.positions is None:
            return None
        sharding = NamedSharding(self.parallel.mesh, PartitionSpec(None, *self.parallel.token_spec))
        put = functools.partial(_put, sharding=sharding)
        return RowPacking(put(places.samples), put(places.positions))

    def _places(self, caller: str) -> "_Places":
        """The sample of every row of the ranks, or of every token where rows are packed."""
        self._refuse_if_superseded()
        if self._assignment is None:
            raise ValueError(
                f"{caller} moves arrays of the host: call it on what prepare returned, not under jit nor on a copy"
            )
        copies, ranks = math.prod(self.parallel.copies), self.parallel.topology.num_ranks

        def by_copy(leaf: Array, axes: int) -> np.ndarray:
            """``[copies x M, N, G, rows, *T]`` as ``[M, copies x N x G x rows, *T]``."""
            leaf = np.asarray(leaf)
            inner = leaf.shape[4 : 4 + axes]
            leaf = leaf.reshape(copies, -1, ranks, leaf.shape[3], *inner).swapaxes(0, 1)
            return leaf.reshape(leaf.shape[0], -1, *inner)

        if self._rows is None:
            return _Places(by_copy(self._assignment.sample, 0), None)
        return _Places(*(by_copy(leaf, 1) for leaf in self._rows))

    def _refuse_if_superseded(self) -> None:
        if self.check_in_force is not None:
            self.check_in_force()


def _put(rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


class _Places(NamedTuple):
    """What stands in the rows of the ranks, micro-batch by micro-batch."""

    samples: np.ndarray
    """The sample of each row, or token; EMPTY for none."""
    positions: np.ndarray | None
    """The position of each token in its sample, where rows are packed."""


def to_host(array: Array) -> np.ndarray:
    """The whole of an array; of one over several processes, all call it."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def _flatten(batch: PreparedBatch) -> tuple[tuple[Any, Any], ExpertParallel]:
    # Jitted functions flatten their arguments at every call, so this is where a step is refused on the host.
    batch._refuse_if_superseded()
    return (batch._batch_plan, batch._layers), batch.parallel


def _unflatten(parallel: ExpertParallel, children: tuple[Any, Any]) -> PreparedBatch:
    return PreparedBatch(children[0], parallel, layers=children[1])


jax.tree_util.register_pytree_node(PreparedBatch, _flatten, _unflatten)
