"""A prepared batch: what its steps need, for as long as the experts lie where it wants them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.types import EMPTY, Assignment, BatchPlan, LayerPlan


class PreparedBatch:
    """What `relibra_jax.nnx.Balancer.prepare` returns. Give it to jitted steps as it is.

    A pytree: the batch plan is its array part, `parallel` is static. Under jit the plan is traced, so a compiled step
    serves every batch of the same sizes. Outside of jit it remembers which batch it is: given to a step after the
    experts moved on for another batch, it is refused.
    """

    parallel: ExpertParallel
    """Mesh, topology, buffer sizes and kinds of exchange, for `relibra_jax.nnx.MoELayer`."""
    plan_seconds: float
    """How long the host planned, checked and counted; 0 under jit."""

    def __init__(
        self,
        batch_plan: BatchPlan | None,
        parallel: ExpertParallel,
        *,
        assignment: Assignment | None = None,
        num_samples: int = 0,
        plan_seconds: float = 0.0,
        check_in_force: Callable[[], None] | None = None,
    ):
        self._batch_plan, self.parallel, self.plan_seconds = batch_plan, parallel, plan_seconds
        self._assignment, self._num_samples = assignment, num_samples
        self._check_in_force = check_in_force

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

    def layer_plans(self) -> LayerPlan | None:
        """The layer plans of all micro-batches, stacked ``[M, L, *copies]``, to be scanned beside the rows of
        `to_ranks`; None for live routing."""
        self._refuse_if_superseded()
        if self._batch_plan is None:
            return None
        plans, copies = self._batch_plan.layer_plans(), self.parallel.copies
        if not copies:
            return plans

        def by_copy(leaf: jax.Array) -> jax.Array:
            leaf = jnp.asarray(leaf).reshape(math.prod(copies), -1, *leaf.shape[1:])
            leaf = jnp.moveaxis(leaf, 0, 2)  # [M, L, copies, ...]
            return leaf.reshape(*leaf.shape[:2], *copies, *leaf.shape[3:])

        return jax.tree.map(by_copy, plans)

    def micro_batch(self, index: Any) -> LayerPlan | None:
        """The layer plans of one micro-batch, stacked ``[L, *copies]``; None for live routing."""
        plans = self.layer_plans()
        return None if plans is None else plans.layer(index)

    def to_ranks(self, samples: PyTree) -> PyTree:
        """Bring the batch's rows to the ranks that own them, micro-batch by micro-batch. Runs on the host.

        Args:
            samples: any tree of host arrays ``[B, ...]``, one row for each sample of the batch, the same on all
                processes: tokens, masks, weights, the replay itself.

        Returns:
            The same tree of ``[M, rows, ...]`` arrays, ``rows`` sharded over the ranks; zeros (False) where a rank
            has room for a further sample.

        Raises:
            ValueError: if an array has not one row a sample, or another batch has been prepared since.
        """
        self._refuse_if_superseded()
        if self._assignment is None:
            raise ValueError(
                "to_ranks moves arrays of the host: call it on what prepare returned, not under jit nor on a copy"
            )
        copies, topology = math.prod(self.parallel.copies), self.parallel.topology
        sample = np.asarray(self._assignment.sample)
        by_copy = sample.reshape(copies, -1, topology.num_ranks, sample.shape[-1])
        places = by_copy.swapaxes(0, 1).reshape(by_copy.shape[1], -1)
        sharding = NamedSharding(self.parallel.mesh, PartitionSpec(None, *self.parallel.token_spec))

        def move(path: Any, leaf: Any) -> jax.Array:
            rows = np.asarray(leaf)
            if rows.ndim < 1 or len(rows) != self._num_samples:
                name = f"samples{jax.tree_util.keystr(path)}"
                raise ValueError(
                    f"{name}: shape {rows.shape} for a batch of {self._num_samples} samples; give to_ranks the rows of"
                    " the batch that was prepared, in its order"
                )
            rows = rows[np.maximum(places, 0)]
            rows[places == EMPTY] = 0
            return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])

        return jax.tree.map_with_path(move, samples)

    def _refuse_if_superseded(self) -> None:
        if self._check_in_force is not None:
            self._check_in_force()


def live_batch(parallel: ExpertParallel, *, num_samples: int | None, num_micro_batches: int) -> PreparedBatch:
    """A batch that is routed live: samples in order, experts where they are, no replicas.

    Args:
        parallel: how plans are run, without replica slots.
        num_samples: B.
        num_micro_batches: M of each copy of the group.

    Raises:
        ValueError: if the number of samples is not given, or less than one for each micro-batch.
    """
    if num_samples is None or num_samples < num_micro_batches:
        raise ValueError(
            f"prepare(replay=None) prepares live routing: give it num_samples of at least num_micro_batches="
            f"{num_micro_batches}, not {num_samples}"
        )
    entries = num_micro_batches * math.prod(parallel.copies)
    assignment = assign_in_order(num_samples, parallel.topology, num_micro_batches=entries)
    return PreparedBatch(None, parallel, assignment=assignment, num_samples=num_samples)


def _flatten(batch: PreparedBatch) -> tuple[tuple[BatchPlan | None], ExpertParallel]:
    # Jitted functions flatten their arguments at every call, so this is where a step is refused on the host.
    batch._refuse_if_superseded()
    return (batch._batch_plan,), batch.parallel


def _unflatten(parallel: ExpertParallel, children: tuple[Any]) -> PreparedBatch:
    return PreparedBatch(children[0], parallel)


jax.tree_util.register_pytree_node(PreparedBatch, _flatten, _unflatten)
