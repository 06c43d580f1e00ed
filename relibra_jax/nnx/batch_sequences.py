"""The sequences in which a batch's samples lie on the ranks, and their way there and back, on the host."""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree

from relibra_jax.contract.types import EMPTY, Array, Assignment
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.routing.sequence_packing import SequenceLayout


class SequencePacking(NamedTuple):
    """The sample and position of each token, for sequences that hold several samples one after another."""

    segments: Int[Array, "*M sequences T"]
    """The index in the batch of each token's sample; EMPTY on padding. Tokens attend only to tokens of their sample."""
    positions: Int[Array, "*M sequences T"]
    """The position of each token in its sample."""


class BatchSequences(NamedTuple):
    """The sequences of all ranks, micro-batch by micro-batch: one group's after another's."""

    samples: Int[np.ndarray, "M sequences *T"]
    """The sample of each sequence, or with packed sequences of each token; EMPTY for none."""
    positions: Int[np.ndarray, "M sequences T"] | None
    """The position of each token in its sample; None if sequences are not packed."""
    num_samples: int
    """B, the number of samples of the batch."""
    num_tokens: int
    """T, the number of token positions of a sample in the replay."""
    sharding: NamedSharding
    """The sharding of arrays ``[M, sequences, ...]``, with their memory kind."""

    def to_ranks(self, samples: PyTree) -> PyTree:
        """Put arrays ``[B, ...]`` on the ranks, as `relibra_jax.nnx.PreparedBatch.to_ranks` describes it."""

        def move(path: Any, leaf: Any) -> jax.Array:
            samples = np.asarray(leaf)
            if samples.ndim < 1 or len(samples) != self.num_samples:
                name = f"samples{jax.tree_util.keystr(path)}"
                raise ValueError(
                    f"{name}: shape {samples.shape}, but the batch has {self.num_samples} samples; to_ranks needs one"
                    " row for each sample, in the order of the prepared batch"
                )
            has_token_axis = self.positions is not None and samples.shape[1:2] == (self.num_tokens,)
            sample = np.maximum(self.samples, 0)
            sequences = samples[sample, self.positions] if has_token_axis else samples[sample]
            sequences[self.samples == EMPTY] = 0
            return self._put(sequences)

        return jax.tree.map_with_path(move, samples)

    def from_ranks(self, sequences: PyTree) -> PyTree:
        """Bring arrays ``[M, sequences, ...]`` back, as `relibra_jax.nnx.PreparedBatch.from_ranks` describes it."""
        is_real = self.samples != EMPTY

        def move(path: Any, leaf: Any) -> np.ndarray:
            if np.shape(leaf)[: self.samples.ndim] != self.samples.shape:
                name = f"sequences{jax.tree_util.keystr(path)}"
                raise ValueError(
                    f"{name}: shape {np.shape(leaf)}, but the micro-batches and sequences of this batch are"
                    f" {self.samples.shape}"
                )
            values = whole_array(leaf)[is_real]
            shape = (self.num_samples,) if self.positions is None else (self.num_samples, self.num_tokens)
            batch = np.zeros((*shape, *values.shape[1:]), values.dtype)
            places = self.samples[is_real]
            batch[places if self.positions is None else (places, self.positions[is_real])] = values
            return batch

        return jax.tree.map_with_path(move, sequences)

    def packing(self) -> SequencePacking | None:
        """Return the sample and position of each token on the ranks; None if sequences are not packed."""
        if self.positions is None:
            return None
        return SequencePacking(self._put(self.samples), self._put(self.positions))

    def _put(self, array: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(array.shape, self.sharding, lambda index: array[index])


def batch_sequences(
    assignment: Assignment,
    layout: SequenceLayout | None,
    parallel: ExpertParallel,
    *,
    num_samples: int,
    num_tokens: int = 0,
    memory_kind: str = "device",
) -> BatchSequences:
    """Lay out the samples of a batch in the sequences of the ranks.

    Args:
        assignment: the samples of every rank. The micro-batches of one group come after those of another.
        layout: the layout of packed sequences. None puts every sample in a sequence of its own.
        parallel: the mesh and topology, with the data axes of the groups.
        num_samples: B, the number of samples of the batch.
        num_tokens: T, the number of token positions of a sample, for packed sequences.
        memory_kind: the memory of arrays on the ranks (`relibra_jax.execution.memory`).
    """
    merge = functools.partial(_merge_groups, groups=math.prod(parallel.data_shape))
    samples, positions = (assignment.sample, None) if layout is None else layout
    return BatchSequences(
        samples=merge(samples),
        positions=None if positions is None else merge(positions),
        num_samples=num_samples,
        num_tokens=num_tokens,
        sharding=NamedSharding(
            parallel.mesh, PartitionSpec(None, *parallel.token_spec), memory_kind=memory_kind
        ),
    )


def _merge_groups(leaf: Int[Array, "M N G r *T"], *, groups: int) -> Int[np.ndarray, "m sequences *T"]:
    """Regroup ``[groups x M, N, G, r, *T]`` as ``[M, groups x N x G x r, *T]``."""
    by_group = np.asarray(leaf).reshape(groups, -1, *leaf.shape[1:]).swapaxes(0, 1)
    return by_group.reshape(len(by_group), -1, *leaf.shape[4:])


def whole_array(array: Array) -> np.ndarray:
    """Copy a whole array to the host. If it spans several processes, every process must call this function."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)
