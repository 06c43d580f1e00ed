"""The sequences in which a batch's samples lie on the ranks, and their way there and back, on the host."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree

from relibra_jax.contract.types import EMPTY, Array, Assignment
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.row_exchange import Places, deal_rows, exchange_rows, own_ranks, put_rows
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

    def to_ranks(self, samples: PyTree, own: Int[Array, " b"] | None = None) -> PyTree:
        """Put arrays ``[B, ...]`` on the ranks, as `relibra_jax.nnx.PreparedBatch.to_ranks` describes it."""
        rows = self.num_samples if own is None else len(own)
        places = None if own is None else deal_rows(np.asarray(own), self.num_samples, self._mesh, self._axes)

        def move(path: Any, leaf: Any) -> jax.Array:
            samples = np.asarray(leaf)
            if samples.ndim < 1 or len(samples) != rows:
                name, which = jax.tree_util.keystr(path), "the batch has" if own is None else "own names"
                raise ValueError(
                    f"samples{name}: shape {samples.shape}, but {which} {rows} samples; to_ranks needs one row for each"
                    " sample, in the order of the prepared batch"
                )
            has_token_axis = self.positions is not None and samples.shape[1:2] == (self.num_tokens,)
            if places is not None:
                return self._exchange(samples, places, has_token_axis=has_token_axis)
            sample = np.maximum(self.samples, 0)
            sequences = samples[sample, self.positions] if has_token_axis else samples[sample]
            sequences[self.samples == EMPTY] = 0
            return self._put(sequences)

        return jax.tree.map_with_path(move, samples)

    def from_ranks(self, sequences: PyTree, own: Int[Array, " b"] | None = None) -> PyTree:
        """Bring arrays ``[M, sequences, ...]`` back, as `relibra_jax.nnx.PreparedBatch.from_ranks` describes it."""
        is_real = self.samples != EMPTY
        places = None if own is None else deal_rows(np.asarray(own), self.num_samples, self._mesh, self._axes)

        def move(path: Any, leaf: Any) -> np.ndarray:
            if np.shape(leaf)[: self.samples.ndim] != self.samples.shape:
                name = f"sequences{jax.tree_util.keystr(path)}"
                raise ValueError(
                    f"{name}: shape {np.shape(leaf)}, but the micro-batches and sequences of this batch are"
                    f" {self.samples.shape}"
                )
            if own is not None and places is not None:
                return self._bring_own(leaf, np.asarray(own), places)
            values = whole_array(leaf)[is_real]
            shape = (self.num_samples,) if self.positions is None else (self.num_samples, self.num_tokens)
            batch = np.zeros((*shape, *values.shape[1:]), values.dtype)
            rows = self.samples[is_real]
            batch[rows if self.positions is None else (rows, self.positions[is_real])] = values
            return batch

        return jax.tree.map_with_path(move, sequences)

    def packing(self) -> SequencePacking | None:
        """Return the sample and position of each token on the ranks; None if sequences are not packed."""
        if self.positions is None:
            return None
        return SequencePacking(self._put(self.samples), self._put(self.positions))

    @property
    def _mesh(self) -> Mesh:
        mesh = self.sharding.mesh
        assert isinstance(mesh, Mesh)
        return mesh

    @property
    def _axes(self) -> tuple[str, ...]:
        """The mesh axes of the ranks."""
        return self.sharding.spec[1]

    def _exchange(self, rows: np.ndarray, places: Places, *, has_token_axis: bool) -> jax.Array:
        """Bring rows of samples, of which every process has its own, to the sequences of the ranks."""
        mesh, axes = self._mesh, self._axes
        spread = put_rows(rows, places, mesh, axes)
        wanted = places.take(self.samples)
        if has_token_axis:
            tokens = (spread.shape[0] * self.num_tokens, *spread.shape[2:])
            spread = _reshape(spread, tokens, NamedSharding(mesh, PartitionSpec(axes)))
            token = wanted.place * self.num_tokens + self.positions
            wanted = Places(wanted.rank, np.where(wanted.rank == EMPTY, EMPTY, token))
        by_rank = Places(
            *(leaf.reshape(len(leaf), mesh.devices.size, -1).astype(np.int32) for leaf in wanted)
        )
        arrived = exchange_rows(spread, by_rank, mesh=mesh, axes=axes)
        sharding = self.sharding.with_memory_kind("device")
        sequences = _reshape(arrived, (*self.samples.shape, *arrived.shape[2:]), sharding)
        return jax.device_put(sequences, self.sharding)

    def _bring_own(self, leaf: jax.Array, own: np.ndarray, places: Places) -> np.ndarray:
        """Bring this process the results of its own samples, of which `deal_rows` gives its ranks some each."""
        mesh, axes, ranks = self._mesh, self._axes, self._mesh.devices.size
        of_rank = self.samples.shape[1] // ranks
        # A rank's rows are its sequences, or their tokens, one micro-batch after another.
        on_device = jax.device_put(leaf, self.sharding.with_memory_kind("device"))
        flat = _rows_of_rank(on_device, mesh, axes, self.samples.ndim)
        micro_batch, sequence, *token = np.indices(self.samples.shape)
        place = micro_batch * of_rank + sequence % of_rank
        if token:
            place = place * self.samples.shape[2] + token[0]
        is_real = self.samples != EMPTY
        shape = (self.num_samples,) if self.positions is None else (self.num_samples, self.num_tokens)
        where = (
            self.samples[is_real]
            if self.positions is None
            else (self.samples[is_real], self.positions[is_real])
        )
        rank_of, place_of = (np.full(shape, EMPTY, np.int32) for _ in range(2))
        rank_of[where], place_of[where] = (sequence // of_rank)[is_real], place[is_real]
        # Each rank gets as many of its process's samples as any other, a few at a time.
        room = int(places.place.max(initial=-1)) + 1
        parts = min(len(self.samples), max(room, 1))
        room = -(-room // parts) * parts
        wanted = Places(*(np.full((ranks, room, *shape[1:]), EMPTY, np.int32) for _ in range(2)))
        for table, values in zip(wanted, (rank_of, place_of), strict=True):
            table[places.rank, places.place] = values
        wanted = Places(*(np.moveaxis(each.reshape(ranks, parts, -1), 1, 0) for each in wanted))
        arrived = exchange_rows(flat, wanted, mesh=mesh, axes=axes)
        mine = {shard.index[1].start or 0: np.asarray(shard.data) for shard in arrived.addressable_shards}
        by_rank = np.stack([mine[start] for start in sorted(mine)])  # [D, parts, k, ...]
        by_rank = by_rank.reshape(len(mine), room, *shape[1:], *by_rank.shape[3:])
        number, rank = places.place[own], np.searchsorted(own_ranks(mesh), places.rank[own])
        return by_rank[rank, number]

    def _put(self, array: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(array.shape, self.sharding, lambda index: array[index])


def batch_sequences(
    assignment: Assignment,
    layout: SequenceLayout | None,
    parallel: ExpertParallel,
    *,
    num_samples: int,
    num_tokens: int,
    memory_kind: str,
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
    merge = functools.partial(_merge_groups, groups=parallel.num_groups)
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


@functools.partial(jax.jit, static_argnums=(1, 2))
def _reshape(array: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """Reshape an array so that every rank keeps its part."""
    return jax.lax.with_sharding_constraint(array.reshape(shape), sharding)


@functools.partial(jax.jit, static_argnames=("mesh", "axes", "ndim"))
def _rows_of_rank(sequences: jax.Array, mesh: Mesh, axes: tuple[str, ...], ndim: int) -> jax.Array:
    """Make every sequence, or every token of packed ones, a row of its rank, one micro-batch after another."""
    return jax.shard_map(
        lambda part: part.reshape(-1, *part.shape[ndim:]),
        mesh=mesh,
        in_specs=PartitionSpec(None, axes),
        out_specs=PartitionSpec(axes),
    )(sequences)


def _merge_groups(leaf: Int[Array, "M N G r *T"], *, groups: int) -> Int[np.ndarray, "m sequences *T"]:
    """Regroup ``[groups x M, N, G, r, *T]`` as ``[M, groups x N x G x r, *T]``."""
    by_group = np.asarray(leaf).reshape(groups, -1, *leaf.shape[1:]).swapaxes(0, 1)
    return by_group.reshape(len(by_group), -1, *leaf.shape[4:])


def whole_array(array: Array) -> np.ndarray:
    """Copy a whole array to the host. If it spans several processes, every process must call this function."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)
