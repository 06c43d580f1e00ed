"""The prepared batch: the plan, tables and buffer sizes for the training steps of one batch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Int, PyTree

from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.types import EMPTY, Array, BatchPlan
from relibra_jax.execution.memory import HOST, take, to_host
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer, prepare_micro_batch
from relibra_jax.nnx.batch_routes import BatchRoutes
from relibra_jax.nnx.batch_sequences import BatchSequences, SequencePacking
from relibra_jax.nnx.modelled_times import ModelledTimes, summarise


class HostBatch(NamedTuple):
    """The part of a prepared batch that stays on the host."""

    sequences: BatchSequences
    """The sequences of the ranks in which the samples lie."""
    check_current: Callable[[], None] = lambda: None
    """A function that raises ValueError if the balancer has prepared another batch."""
    plan_seconds: float = 0.0
    """The seconds in which the host computed and checked the plan."""
    size_seconds: float = 0.0
    """The seconds in which the host counted the buffer sizes."""
    visits: Int[np.ndarray, "M L P V"] | None = None
    """The number of tokens that each rank sends to each node of ``topology.visited``, including its own. None on the
    flat path."""
    model_times: Callable[[], ModelledTimes] | None = None
    """A function that models the times of the batch. None if it was planned without a price."""


class PreparedBatch:
    """A batch that `relibra_jax.nnx.Balancer.prepare` has prepared. Pass it to jitted steps as an argument.

    It is a pytree: the batch plan and the prepared layers are its arrays, and `parallel` is static. One compiled step
    therefore serves every batch with the same sizes. Outside jit the object knows its batch: if a step or a method
    uses it after the balancer has prepared another batch and moved the experts, it raises ValueError.
    """

    parallel: ExpertParallel
    """The mesh, topology, buffer sizes and kinds of exchange for `relibra_jax.nnx.MoELayer`."""
    host: HostBatch | None
    """The part that stays on the host; None under jit."""

    def __init__(
        self,
        batch_plan: BatchPlan | None,
        parallel: ExpertParallel,
        layers: PreparedLayer | None = None,
        host: HostBatch | None = None,
    ):
        self._batch_plan, self.parallel, self._layers, self.host = batch_plan, parallel, layers, host

    @property
    def batch_plan(self) -> BatchPlan:
        """The assignment, load and plan of all micro-batches.

        The micro-batches of further data-parallel groups are additional entries of M, one group after another.

        Raises:
            ValueError: if the batch was prepared for live routing, which has no plan.
        """
        self.check_current()
        if self._batch_plan is None:
            raise ValueError("this batch was prepared for live routing, which has no plan")
        return self._batch_plan

    @property
    def plan_seconds(self) -> float:
        """The seconds in which the host computed and checked the plan; 0 under jit."""
        return 0.0 if self.host is None else self.host.plan_seconds

    @property
    def size_seconds(self) -> float:
        """The seconds in which the host counted the buffer sizes; 0 under jit."""
        return 0.0 if self.host is None else self.host.size_seconds

    @property
    def visits(self) -> Int[np.ndarray, "M L P V"] | None:
        """The number of tokens that each rank sends to each node, including its own, on the hierarchical path; on a
        single node, to each rank.

        None on the flat path, for live routing, and under jit. Upper bounds if the batch was prepared from counts alone
        (`relibra_jax.routing.visits.most_visits`), or on a single node or from the routes of each process's own samples
        (`relibra_jax.routing.visits.possible_visits`).
        """
        return None if self.host is None else self.host.visits

    @functools.cached_property
    def modelled_times(self) -> ModelledTimes | None:
        """The modelled time of this stage under its plan, if it stayed put, and balanced; computed on first use.

        None for live routing, for plans without a price (``Balancer(cost="balance")``), and under jit.
        """
        if self.host is None or self.host.model_times is None:
            return None
        return self.host.model_times()

    def summary(self) -> str:
        """Describe in five lines what the plan is expected to gain: modelled time, not measured, by parts.

        The lines are a title, the plan, staying put (`relibra_jax.nnx.modelled_times.ModelledTimes`), the balanced run,
        and the shares with the measured seconds of planning. With resident slots, another line says how many hold an
        expert. A batch without a price has one line that says so. Runs on the host.
        """
        self._on_host("summary")
        if self._batch_plan is None:
            return "this batch routes live: it has no plan, so no time is modelled"
        if self.modelled_times is None:
            return (
                "this batch was planned for balance, without a price, so no time is modelled; planned in"
                f" {self.plan_seconds:.2f} s (measured)"
            )
        summary, topology = summarise(self.modelled_times, self.plan_seconds), self.parallel.topology
        if not topology.resident_slots:
            return summary
        slots = np.asarray(resident_experts(self._batch_plan.plan, topology))
        used = int((slots != EMPTY).sum())
        return f"{summary}\n  {used} of {slots.size} resident slots of all layers hold an expert"

    def layers(self) -> PreparedLayer | None:
        """Return the prepared layers of all micro-batches, stacked ``[M, L, *data]``; None for live routing.

        They lie in the memory of the balancer's ``memory_kind``, as the sequences of `to_ranks` do. In a scan over
        micro-batches, `relibra_jax.execution.memory.take` returns those of one. They do not contain the weights of
        residents, which change with every update (`relibra_jax.nnx.accumulate_gradients`).

        Raises:
            ValueError: if the batch was prepared from counts alone, which have no routes to prepare layers from.
        """
        self.check_current()
        if self._layers is None and self._batch_plan is not None:
            raise ValueError(
                "this batch was prepared from counts alone, so it has no prepared layers: prepare those of each"
                " micro-batch in the step, from its routes and batch_plan.micro_batch(m)"
                " (relibra_jax.execution.prepared_layer.prepare_layers), or prepare the batch with its replay"
            )
        return self._layers

    def micro_batch(self, index: Any) -> PreparedLayer | None:
        """Return the prepared layers of one micro-batch in device memory, stacked ``[L, *data]``; None for live
        routing."""
        layers = self.layers()
        return None if layers is None else take(layers, index)

    def to_ranks(self, samples: PyTree, *, own: Int[Array, " b"] | None = None) -> PyTree:
        """Put the samples of the batch on the ranks that compute them, micro-batch by micro-batch. Runs on the host.

        Args:
            samples: any tree of host arrays ``[B, ...]``, such as tokens, masks, weights or the replay itself, with one
                row for each sample of the batch and equal on all processes. A stage with some of the samples picks
                their rows.
            own: the numbers in the batch of the samples whose rows the arrays have, ``[b, ...]``, if each process has
                only its own. The rows then travel between the devices, one micro-batch at a time. None if every process
                has all rows.

        Returns:
            The same tree with arrays ``[M, sequences, ...]``, where ``sequences`` is sharded over the ranks and unused
            sequences are zero (False). With packed sequences all arrays are ``[M, sequences, T, ...]``. An array whose
            second axis is the replay's token axis has its tokens in their packed positions. Any other array has the
            value of a sample at each of its tokens.

        Raises:
            ValueError: if an array does not have one row for each sample, or the balancer has prepared another batch.
        """
        return self._sequences("to_ranks").to_ranks(samples, own)

    def from_ranks(self, sequences: PyTree, *, own: Int[Array, " b"] | None = None) -> PyTree:
        """Bring the results of steps back from the ranks' sequences into the order of the batch. Runs on the host.

        If there are several processes, every process must call it.

        Args:
            sequences: any tree of arrays ``[M, sequences, ...]`` with the sequences of `to_ranks`, or with packed
                sequences ``[M, sequences, T, ...]``.
            own: the numbers of the samples of which this process gets the results, ``[b, ...]`` in this order. None
                brings all results to every process.

        Returns:
            The same tree with host arrays ``[B, ...]``, or ``[B, T, ...]`` with packed sequences; with ``own`` b of
            these rows; zeros (False) for samples outside this stage.

        Raises:
            ValueError: if an array has different numbers of micro-batches and sequences, or the balancer has
                prepared another batch.
        """
        return self._sequences("from_ranks").from_ranks(sequences, own)

    @property
    def packing(self) -> SequencePacking | None:
        """The sample and position of each token in the ranks' packed sequences, ``[M, sequences, T]``.

        None if sequences are not packed. Pass the packing of each micro-batch to the model.
        """
        return self._sequences("packing").packing()

    def check_current(self) -> None:
        """Raise ValueError if the balancer has prepared another batch. Under jit every batch passes."""
        if self.host is not None:
            self.host.check_current()

    def _sequences(self, caller: str) -> BatchSequences:
        self.check_current()
        return self._on_host(caller).sequences

    def _on_host(self, caller: str) -> HostBatch:
        if self.host is None:
            raise ValueError(
                f"{caller} runs on the host: call it outside jit, on the object that Balancer.prepare returned and not"
                " on a copy of it"
            )
        return self.host


def _flatten(batch: PreparedBatch) -> tuple[tuple[Any, Any], ExpertParallel]:
    # A jitted function flattens its arguments at every call, so this check catches an outdated batch on the host.
    batch.check_current()
    return (batch._batch_plan, batch._layers), batch.parallel


def _unflatten(parallel: ExpertParallel, children: tuple[Any, Any]) -> PreparedBatch:
    batch_plan, layers = children
    return PreparedBatch(batch_plan, parallel, layers)


jax.tree_util.register_pytree_node(PreparedBatch, _flatten, _unflatten)


def prepare_replayed(
    batch_plan: BatchPlan, parallel: ExpertParallel, sequences: BatchSequences, routes: BatchRoutes
) -> PreparedLayer:
    """Prepare the layers of a batch that follows recorded routing, on the devices.

    Args:
        batch_plan: the plan of the batch, on the mesh.
        parallel: the mesh, topology, buffer sizes and exchanges with which layers execute the plan.
        sequences: the sequences of the ranks in which the samples lie.
        routes: the recorded routes, on the host.

    Returns:
        The prepared layers, stacked ``[M, L, *data]``.

    Raises:
        RuntimeError: if the devices find a layer invalid: the plan was made from the counts of another replay. With the
            replay's own counts this should not happen.
    """
    on_ranks = sequences.to_ranks(tuple(routes.replay), routes.own)
    layers, valid = _prepare(*on_ranks, batch_plan, parallel, sequences.sharding.memory_kind)
    invalid = np.argwhere(~np.asarray(valid)).tolist()
    if invalid:
        micro_batch, layer = invalid[0]
        raise RuntimeError(
            f"micro-batch {micro_batch}, layer {layer}: the checked plan is invalid on the devices ({len(invalid)}"
            " invalid layers in all): were its counts those of this replay? Buffers are"
            f" {parallel.capacities}"
        )
    return layers


@functools.partial(jax.jit, static_argnames=("parallel", "memory_kind"))
def _prepare(
    ids: Array, mask: Array, batch_plan: BatchPlan, parallel: ExpertParallel, memory_kind: str
) -> tuple[PreparedLayer, Bool[jax.Array, "M L"]]:
    """Return the prepared layers in this memory, and whether each of them is valid on all ranks of all groups."""
    plans = by_group(batch_plan.layer_plans(), parallel)

    def micro_batch(_, number):
        ids_of_one, mask_of_one, plan = take((ids, mask, plans), number)
        ids_of_one = jnp.where(mask_of_one[..., None, None], ids_of_one.astype(jnp.int32), EMPTY)
        layers = prepare_micro_batch(ids_of_one, plan, parallel)
        assert layers.token_tables is not None
        valid = jnp.asarray(layers.token_tables.valid)
        if layers.fetch_tables is not None:
            valid &= layers.fetch_tables.fits
        return None, (to_host(layers) if memory_kind == HOST else layers, valid)

    layers, valid = jax.lax.scan(micro_batch, None, jnp.arange(len(ids)))[1]
    replicated = NamedSharding(parallel.mesh, PartitionSpec())
    valid = valid.reshape(*valid.shape[:2], -1).all(-1)
    return layers, jax.lax.with_sharding_constraint(valid, replicated)


def by_group(plans: Any, parallel: ExpertParallel) -> Any:
    """Regroup arrays ``[groups x M, L, ...]`` over the micro-batches of all groups as ``[M, L, *data, ...]``."""
    data_shape = parallel.data_shape
    if not data_shape:
        return plans

    def regroup(leaf: jax.Array) -> jax.Array:
        leaf = jnp.asarray(leaf).reshape(parallel.num_groups, -1, *leaf.shape[1:])
        leaf = jnp.moveaxis(leaf, 0, 2)
        return leaf.reshape(*leaf.shape[:2], *data_shape, *leaf.shape[3:])

    return jax.tree.map(regroup, plans)
