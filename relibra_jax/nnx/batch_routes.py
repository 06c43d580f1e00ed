"""The recorded routes of a batch on the host, whole or by process, and what is counted from them.

With several processes, a process may have the routes of its own samples alone. Everything that is counted from routes
is a sum over samples, so each process counts its own, and the processes add up their counts. The routes themselves
go to the ranks that train on them (`relibra_jax.execution.row_exchange`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Int

from relibra_jax.contract.planner import Planner
from relibra_jax.contract.replay import sample_load
from relibra_jax.contract.types import EMPTY, Array, Assignment, BatchPlan, Price, RoutingReplay, Topology
from relibra_jax.execution.plan_agreement import add_up, gather_rows
from relibra_jax.planning.batch import Batch, count_for_planner, may_be_positive
from relibra_jax.planning.routes import TOKENS, Routes, token_places
from relibra_jax.planning.transitions import count_transitions
from relibra_jax.routing.sequence_packing import SequenceLayout, in_sequences


@dataclass(frozen=True)
class BatchRoutes:
    """The recorded routes of a batch, or those of the samples that this process has."""

    replay: RoutingReplay
    """The routes ``[b, T, L, K]`` and masks ``[b, T]`` of the samples, on the host."""
    own: Int[np.ndarray, " b"] | None = None
    """The number in the batch of each sample. None for all samples of the batch, on every process."""

    @property
    def top_k(self) -> int:
        """K, the number of experts of a token."""
        return self.replay.expert_ids.shape[-1]

    @property
    def num_tokens(self) -> int:
        """T, the number of token positions of a sample."""
        return self.replay.mask.shape[1]

    def num_samples(self) -> int:
        """Return B, the number of samples of the batch. All processes call it."""
        return len(self.replay.mask) if self.own is None else int(add_up(np.int32(len(self.own))))

    def count(self, planner: Planner, topology: Topology, prices: Sequence[Price]) -> Batch:
        """Count what planning needs (`relibra_jax.planning.batch.count_for_planner`). All processes call it.

        The counts do not depend on which process has which samples.
        """
        if self.own is None:
            return count_for_planner(self.replay, planner, topology, prices)
        samples = self.num_samples()
        load = sample_load(self.replay, num_experts=topology.num_experts)
        own_lengths = np.asarray(self.replay.mask).sum(1, dtype=np.int32)
        load, lengths = gather_rows((np.asarray(load), own_lengths), self.own, samples)
        routes = transitions = None
        if any(may_be_positive(price.visit(topology)) for price in prices):
            routes = self._sample_routes(lengths)
        if planner.uses_transitions:
            counted = count_transitions(self.replay, num_experts=topology.num_experts)
            transitions = add_up(jax.device_get(counted))
        return Batch(load, lengths, routes, transitions, sequence_length=float(self.num_tokens))

    def placed(self, plan: BatchPlan, layout: SequenceLayout | None) -> tuple[RoutingReplay, BatchPlan]:
        """Return the routes by sample, or by sequence of a layout, with a plan whose assignment names these.

        Samples and sequences of other processes are EMPTY in the assignment. Counts that follow from both are therefore
        those of this process, and `total` those of the batch.
        """
        if layout is not None:
            return in_sequences(self.replay, plan, layout._replace(sample=self._local(layout.sample)))
        return self.replay, plan._replace(assignment=Assignment(self._local(plan.assignment.sample)))

    def total[T](self, counts: T) -> T:
        """Add up the counts of all processes, or return those of a batch that every process has whole."""
        return counts if self.own is None else add_up(jax.tree.map(np.asarray, counts))

    def _local(self, sample: Int[Array, "..."]) -> Int[np.ndarray, "..."]:
        """Return the row in ``replay`` of samples of the batch; EMPTY for those of other processes."""
        sample = np.asarray(sample)
        if self.own is None:
            return sample
        row = np.full(max(int(sample.max(initial=0)), int(self.own.max(initial=0))) + 2, EMPTY, np.int32)
        row[self.own] = np.arange(len(self.own))
        return row[sample]  # EMPTY is the last entry

    def _sample_routes(self, lengths: Int[np.ndarray, " B"]) -> Routes:
        """Take tokens that are spread over the batch (`relibra_jax.planning.routes.sample_routes`), each from the
        process that has it."""
        sample, number = token_places(lengths, TOKENS)
        row = self._local(sample)
        ids, mask = map(np.asarray, self.replay)
        taken = np.zeros((len(sample), *ids.shape[2:]), ids.dtype)
        for mine in np.unique(row[row != EMPTY]):
            tokens = row == mine
            taken[tokens] = ids[mine, np.flatnonzero(mask[mine])[number[tokens]]]
        return Routes(add_up(taken), sample)
