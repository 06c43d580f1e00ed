"""Multicast copies between the blocks of a cluster, for JAX's GPU interpreter.

JAX's interpreter lets each block load a whole multicast operand by itself. On a GPU, each block loads its share and
writes it to the same buffer in every block, which others may still be reading. This module does the same in the
interpreter. Race detection then covers the accesses between blocks, and a copy arrives at a barrier when all shares of
the buffer have been written, by whichever block.
"""

import contextlib
import dataclasses
import threading
import time
from unittest import mock

import jax
from jax._src.pallas.mosaic.interpret import utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import HostAllocationKey

_tracing = threading.RLock()
SECONDS = 60
"""The time in seconds that a block waits for another one to allocate its buffers."""


@contextlib.contextmanager
def multicast():
    """Make copies with collective axes write to all blocks of a cluster."""
    interpret = jaxpr_interpret.JaxprInterpreter._interpret_copy_gmem_to_smem_p
    copy, landed = gpu_callbacks.copy_gmem_to_smem, _Landed()

    def with_axes(self, eqn, *arguments):
        with _tracing:
            gpu_callbacks.copy_gmem_to_smem = landed.copy if eqn.params["collective_axes"] else copy
            try:
                return interpret(self, eqn, *arguments)
            finally:
                gpu_callbacks.copy_gmem_to_smem = copy

    name = "_interpret_copy_gmem_to_smem_p"
    with mock.patch.object(jaxpr_interpret.JaxprInterpreter, name, with_axes):
        yield
    assert not landed.shares, "a buffer was left with some of its shares"


class _Landed:
    """The shares that have been written, for the buffers that do not yet have all of their shares."""

    def __init__(self):
        self.shares, self.lock = {}, threading.Lock()

    def copy(self, **arguments):
        """Copy like `gpu_callbacks.copy_gmem_to_smem`, but only the share of one block, and to all blocks."""
        return gpu_callbacks.fail_on_exception(self._copy)(**arguments)

    def _copy(self, *, token, thread, **arguments):
        memory = gpu_callbacks._get_shared_memory()
        keys, accesses = [], []
        for name in ("src", "dst", "barrier"):
            key = HostAllocationKey.from_array(arguments[f"{name}_allocation_key_as_array"])
            keys.append(key)
            if name != "barrier":
                transforms = gpu_callbacks._remove_noop_transforms(arguments[f"{name}_transforms"])
                accesses.append(memory.access(key, jax.tree.map(int, transforms)))
        blocks = memory.num_blocks_per_cluster
        source, target = (_share(access, thread.block_id, blocks) for access in accesses)
        clock = memory.incr_clock(thread) if memory.detect_races else None
        for block in range(blocks):
            buffer, barrier = (_in_block(memory, key, block) for key in keys[1:])
            share = _Share(
                arguments["mesh_location"],
                thread,
                keys[0],
                source,
                buffer,
                target,
                barrier,
                arguments["source_info"],
                clock.copy() if clock else None,
            )
            stage = tuple(index for index in target.range if isinstance(index, int))
            share.landed, share.place, share.blocks = self, (tuple(buffer), stage), blocks
            memory.execute_async_task(share)
        return token

    def add(self, share):
        """Record that a share has been written, and arrive at the barrier if it is the last one of its buffer."""
        with self.lock:
            clocks = self.shares.setdefault(share.place, {})
            if share.thread.block_id in clocks:
                raise RuntimeError("a block loads its share again before the others have loaded theirs")
            clocks[share.thread.block_id] = share.clock
            if len(clocks) < share.blocks:
                return
            del self.shares[share.place]
        clock = share.clock
        for other in clocks.values():
            if clock:
                clock.update(other)
        share.barrier.arrive(share.thread, clock, share.logging_info)


class _Share(gpu_callbacks.AsyncCopyGmemToSmemTask):
    def post_write(self, tma_thread_id, shared_memory):
        self.landed.add(self)


def _share(access, number, blocks):
    """Return part ``number`` of an access, which is cut along the first axis that is a slice."""
    parts = list(access.range)
    axis = next(axis for axis, part in enumerate(parts) if isinstance(part, slice))
    start, size = parts[axis].start, (parts[axis].stop - parts[axis].start) // blocks
    parts[axis] = slice(start + number * size, start + (number + 1) * size, parts[axis].step)
    return utils.Access(tuple(parts), access.permutation)


def _in_block(memory, key, block):
    """Wait until another block has made the allocation of this key, and return the key of that allocation."""
    key, end = dataclasses.replace(key, block_id=block), time.monotonic() + SECONDS
    while True:
        with memory.lock:
            if key in memory.mem:
                return key
        memory.check_failed()
        if time.monotonic() > end:
            raise RuntimeError(f"block {block} has not allocated {key}")
        time.sleep(0.001)
