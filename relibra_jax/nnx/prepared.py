"""The prepared batch: the plan, tables and buffer sizes for the training steps of one batch."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree

from relibra_jax.contract.types import EMPTY, Array, Assignment, BatchPlan
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.nnx.modelled_times import ModelledTimes, summarise
from relibra_jax.routing.row_packing import RowLayout


class RowPacking(NamedTuple):
    """The sample and position of each token, for rows that hold several samples one after another."""

    segments: Int[Array, "*M rows T"]
    """The index in the batch of each token's sample; EMPTY on padding. Tokens attend only to tokens of their sample."""
    positions: Int[Array, "*M rows T"]
    """The position of each token in its sample."""


class PreparedBatch:
    """A batch that `relibra_jax.nnx.Balancer.prepare` has prepared. Pass it to jitted steps as an argument.

    It is a pytree: the batch plan and the prepared layers are its arrays, and `parallel` is static. One compiled step
    therefore serves every batch with the same sizes. Outside jit the object knows its batch: if a step or a method
    uses it after the balancer has prepared another batch and moved the experts, it raises ValueError.
    """

    parallel: ExpertParallel
    """The mesh, topology, buffer sizes and kinds of exchange for `relibra_jax.nnx.MoELayer`."""
    plan_seconds: float
    """The seconds in which the host computed and checked the plan; 0 under jit."""
    size_seconds: float
    """The seconds in which the host counted the buffer sizes; 0 under jit."""
    visits: Int[np.ndarray, "M L P N"] | None
    """The number of tokens that each rank sends to each node, including its own, on the hierarchical path. None on the
    flat path, for live routing, and under jit."""
    check_in_force: Callable[[], None] | None
    """A function that raises ValueError if the balancer has prepared another batch; None under jit."""

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
        model_times: Callable[[], ModelledTimes] | None = None,
    ):
        self._batch_plan, self.parallel = batch_plan, parallel
        self.plan_seconds, self.size_seconds = seconds
        self.visits = visits
        self._model_times = model_times
        self._rows, self._num_tokens = rows, num_tokens
        self._layers, self._assignment, self._num_samples = layers, assignment, num_samples
        self.check_in_force = None

    @property
    def batch_plan(self) -> BatchPlan:
        """The assignment, load and plan of all micro-batches.

        The micro-batches of data-parallel copies are additional entries of M, one copy after another.

        Raises:
            ValueError: if the batch was prepared for live routing, which has no plan.
        """
        self._check_current()
        if self._batch_plan is None:
            raise ValueError("this batch was prepared for live routing, which has no plan")
        return self._batch_plan

    @functools.cached_property
    def modelled_times(self) -> ModelledTimes | None:
        """The modelled time of this stage under its plan, if it stayed put, and balanced; computed on first use.

        None for live routing, for plans without a price (``Balancer(cost="balance")``), and under jit.
        """
        return None if self._model_times is None else self._model_times()

    def summary(self) -> str:
        """Describe in five lines what the plan is expected to gain: modelled time, not measured, by parts.

        The lines are a title, the plan, staying put (`relibra_jax.nnx.modelled_times.ModelledTimes`), the balanced run,
        and the shares with the measured seconds of planning. A batch without a price has one line that says so. Runs on
        the host.
        """
        if self._assignment is None:
            raise ValueError("summary runs on the host: call it on the object that Balancer.prepare returned")
        if self._batch_plan is None:
            return "this batch routes live: it has no plan, so no time is modelled"
        if self.modelled_times is None:
            return (
                "this batch was planned for balance, without a price, so no time is modelled; planned in"
                f" {self.plan_seconds:.2f} s (measured)"
            )
        return summarise(self.modelled_times, self.plan_seconds)

    def layers(self) -> PreparedLayer | None:
        """Return the prepared layers of all micro-batches, stacked ``[M, L, *copies]``; None for live routing.

        Scan over them together with the rows of `to_ranks`. They do not contain the weights of residents, which change
        with every update (`relibra_jax.nnx.accumulate_gradients`).
        """
        self._check_current()
        return self._layers

    def micro_batch(self, index: Any) -> PreparedLayer | None:
        """Return the prepared layers of one micro-batch, stacked ``[L, *copies]``; None for live routing."""
        layers = self.layers()
        return None if layers is None else layers.layer(index)

    def to_ranks(self, samples: PyTree) -> PyTree:
        """Put the rows of the batch on the ranks that compute them, micro-batch by micro-batch. Runs on the host.

        Args:
            samples: any tree of host arrays ``[B, ...]``, such as tokens, masks, weights or the replay itself, with one
                row for each sample of the batch and equal on all processes. A stage with some of the samples picks
                their rows.

        Returns:
            The same tree with arrays ``[M, rows, ...]``, where ``rows`` is sharded over the ranks and unused rows are
            zero (False). With packed rows all arrays are ``[M, rows, T, ...]``. An array whose second axis is the
            replay's token axis has its tokens in their packed positions. Any other array has the value of a sample at
            each of its tokens.

        Raises:
            ValueError: if an array does not have one row for each sample, or the balancer has prepared another batch.
        """
        places = self._places("to_ranks")
        sharding = NamedSharding(self.parallel.mesh, PartitionSpec(None, *self.parallel.token_spec))

        def move(path: Any, leaf: Any) -> jax.Array:
            samples = np.asarray(leaf)
            if samples.ndim < 1 or len(samples) != self._num_samples:
                name = f"samples{jax.tree_util.keystr(path)}"
                raise ValueError(
                    f"{name}: shape {samples.shape}, but the batch has {self._num_samples} samples; to_ranks needs one"
                    " row for each sample, in the order of the prepared batch"
                )
            has_token_axis = places.positions is not None and samples.shape[1:2] == (self._num_tokens,)
            sample = np.maximum(places.samples, 0)
            rows = samples[sample, places.positions] if has_token_axis else samples[sample]
            rows[places.samples == EMPTY] = 0
            return _put(rows, sharding)

        return jax.tree.map_with_path(move, samples)

    def from_ranks(self, rows: PyTree) -> PyTree:
        """Bring the results of steps back from the ranks' rows into the order of the batch. Runs on the host.

        If there are several processes, every process must call it, and every process gets all results.

        Args:
            rows: any tree of arrays ``[M, rows, ...]`` with the rows of `to_ranks`, or with packed rows
                ``[M, rows, T, ...]``.

        Returns:
            The same tree with host arrays ``[B, ...]``, or ``[B, T, ...]`` with packed rows; zeros (False) for samples
            outside this stage.

        Raises:
            ValueError: if an array has different numbers of micro-batches and rows, or the balancer has prepared
                another batch.
        """
        samples, positions = self._places("from_ranks")
        is_real = samples != EMPTY

        def move(path: Any, leaf: Any) -> np.ndarray:
            if np.shape(leaf)[: samples.ndim] != samples.shape:
                name, axes = f"rows{jax.tree_util.keystr(path)}", "micro-batches and rows"
                raise ValueError(
                    f"{name}: shape {np.shape(leaf)}, but the {axes} of this batch are {samples.shape}"
                )
            values = to_host(leaf)[is_real]
            shape = (self._num_samples,) if positions is None else (self._num_samples, self._num_tokens)
            batch = np.zeros((*shape, *values.shape[1:]), values.dtype)
            index = samples[is_real] if positions is None else (samples[is_real], positions[is_real])
            batch[index] = values
            return batch

        return jax.tree.map_with_path(move, rows)

    @property
    def packing(self) -> RowPacking | None:
        """The sample and position of each token in the ranks' packed rows, ``[M, rows, T]``.

        None if rows are not packed. Pass the packing of each micro-batch to the model.
        """
        places = self._places("packing")
        if places.positions is None:
            return None
        sharding = NamedSharding(self.parallel.mesh, PartitionSpec(None, *self.parallel.token_spec))
        put = functools.partial(_put, sharding=sharding)
        return RowPacking(put(places.samples), put(places.positions))

    def _places(self, caller: str) -> "_Places":
        """Return the sample of every row of the ranks, or with packed rows the sample and position of every token."""
        self._check_current()
        if self._assignment is None:
            raise ValueError(
                f"{caller} runs on the host: call it outside jit, on the object that Balancer.prepare returned and not"
                " on a copy of it"
            )
        copies, ranks = math.prod(self.parallel.copies), self.parallel.topology.num_ranks

        def over_copies(leaf: Array, axes: int) -> np.ndarray:
            """Regroup ``[copies x M, N, G, rows, *T]`` as ``[M, copies x N x G x rows, *T]``."""
            leaf = np.asarray(leaf)
            inner = leaf.shape[4 : 4 + axes]
            leaf = leaf.reshape(copies, -1, ranks, leaf.shape[3], *inner).swapaxes(0, 1)
            return leaf.reshape(leaf.shape[0], -1, *inner)

        if self._rows is None:
            return _Places(over_copies(self._assignment.sample, 0), None)
        return _Places(*(over_copies(leaf, 1) for leaf in self._rows))

    def _check_current(self) -> None:
        if self.check_in_force is not None:
            self.check_in_force()


def _put(rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


class _Places(NamedTuple):
    """The contents of the ranks' rows, micro-batch by micro-batch."""

    samples: np.ndarray
    """The sample of each row, or with packed rows of each token; EMPTY for none."""
    positions: np.ndarray | None
    """The position of each token in its sample; None if rows are not packed."""


def to_host(array: Array) -> np.ndarray:
    """Copy a whole array to the host. If it spans several processes, every process must call this function."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def _flatten(batch: PreparedBatch) -> tuple[tuple[Any, Any], ExpertParallel]:
    # A jitted function flattens its arguments at every call, so this check catches an outdated batch on the host.
    batch._check_current()
    return (batch._batch_plan, batch._layers), batch.parallel


def _unflatten(parallel: ExpertParallel, children: tuple[Any, Any]) -> PreparedBatch:
    return PreparedBatch(children[0], parallel, layers=children[1])


jax.tree_util.register_pytree_node(PreparedBatch, _flatten, _unflatten)
