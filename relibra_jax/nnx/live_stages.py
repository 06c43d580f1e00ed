"""Stages of a batch on live routing: samples in order or packed, experts at home, no replicas."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from relibra_jax.contract.types import Array
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.nnx.batch_planner import LAYOUTS
from relibra_jax.nnx.batch_sequences import batch_sequences
from relibra_jax.nnx.checks import check_aligned_left
from relibra_jax.nnx.prepared import HostBatch, PreparedBatch
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.plan_batch import Stage, stage_samples
from relibra_jax.planning.sample_packing import pack_samples
from relibra_jax.planning.stage_requests import shift_samples
from relibra_jax.routing.sequence_packing import lay_out_sequences


def live_stages(
    stages: Sequence[Stage],
    mask: Bool[Array, "B T"],
    parallel: ExpertParallel,
    *,
    sequences: str,
    memory_kind: str,
) -> tuple[PreparedBatch, ...]:
    """Prepare stages for live routing.

    Args:
        stages: the stages, with the micro-batches of all data-parallel groups.
        mask: True on the tokens of each sample.
        parallel: the settings of layers on live routing (`ExpertParallel.live`), with their buffer sizes.
        sequences: ``padded`` or ``packed``; ``split`` sequences are packed.
        memory_kind: the memory of the sequences.
    """
    packed = sequences in LAYOUTS
    if packed:
        check_aligned_left(np.asarray(mask))
    num_samples, num_tokens = mask.shape
    lengths = np.asarray(mask).sum(1)
    batches = []
    for stage, samples in zip(stages, stage_samples(num_samples, stages), strict=True):
        assignment, layout = stage.start, None
        if assignment is None:
            options = {"num_micro_batches": stage.num_micro_batches}
            if packed:
                own = pack_samples(lengths[samples.start : samples.stop], parallel.topology, **options)
            else:
                own = assign_in_order(len(samples), parallel.topology, **options)
            assignment = shift_samples(own, samples.start)
        if packed:
            layout = lay_out_sequences(assignment, lengths, align=parallel.aligned_positions)
        batch = batch_sequences(
            assignment,
            layout,
            parallel,
            num_samples=num_samples,
            num_tokens=num_tokens,
            memory_kind=memory_kind,
        )
        batches.append(PreparedBatch(None, parallel, host=HostBatch(batch)))
    return tuple(batches)
