"""What each agent of a GPU kernel does at its barriers, recorded from the kernel's own code.

A kernel decides by the sizes of groups and by the numbers of its blocks and warpgroups, never by time. So an agent
performs the same events in every run. One run of its code finds them, with operations that only record.
"""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import row_product_kernel, weight_gradient_kernel
from support.gpu_machine import (
    Agent,
    Arrivals,
    Arrive,
    AwaitSignals,
    Copy,
    Event,
    Finish,
    Place,
    Read,
    Signal,
    Sync,
    Wait,
    Write,
)


class Kernel(NamedTuple):
    """The agents of one cluster, or of some blocks of every rank."""

    agents: list[Agent]
    arrivals: dict[str, Arrivals]
    """What completes a phase of the barriers of each name."""


class _Reference:
    """A reference to shared memory, to barriers or to an array, or to a part of it."""

    dtype = jnp.dtype(jnp.bfloat16)

    def __init__(
        self, name: str, shape: tuple[int, ...], index: tuple[Any, ...] = (), rank: int | None = None
    ):
        self.name, self.shape, self.index, self.rank = name, shape, index, rank

    @property
    def at(self) -> "_Reference":
        return self

    @property
    def place(self) -> Place:
        """The name and the first index."""
        return self.name, int(self.index[0]) if self.index else 0

    def __getitem__(self, index: Any) -> "_Reference":
        index = index if isinstance(index, tuple) else (index,)
        return _Reference(self.name, self.shape, self.index + index, self.rank)

    def __setitem__(self, index: Any, value: Any) -> None:
        _recorder().write(self if index is ... else self[index])

    def transpose(self, _: Any) -> "_Reference":
        return self

    __array_ufunc__ = None  # numpy leaves products to __rmul__

    def __rmul__(self, value: Any) -> Any:
        """A scale that is read from global memory changes no event."""
        return value


class _Recorder:
    """The events of one agent so far. Contents have the numbers that their barriers' phases have for it."""

    def __init__(self, numbers: dict[str, int]) -> None:
        self.numbers = numbers
        """The index of the agent along each axis of the grid, and its warpgroup."""
        self.events: list[Event] = []
        self.waits: dict[Place, int] = {}
        self.copies: dict[Place, tuple[Place, int]] = {}
        self.written: dict[Place, int] = {}

    def wait(self, barrier: _Reference) -> None:
        self.waits[barrier.place] = self.waits.get(barrier.place, 0) + 1
        self.events.append(Wait(barrier.place))

    def arrive(self, barrier: _Reference) -> None:
        self.events.append(Arrive(barrier.place))

    def copy(
        self, source: _Reference, target: _Reference, barrier: _Reference, collective_axes: str | None = None
    ) -> None:
        buffer = target.place
        # The first buffer of a barrier gets a copy in every phase, the others in some.
        first, number = self.copies.setdefault(barrier.place, (buffer, -1))
        number += buffer == first
        self.copies[barrier.place] = first, number
        self.written.pop(buffer, None)
        self.events.append(Copy(buffer, barrier.place, number, collective_axes is not None, source.rank))

    def content(self, buffer: Place) -> tuple[Place, int]:
        """Return a buffer and the number of the content that it must have now."""
        return buffer, self.written.get(buffer, self.waits.get(("full", buffer[1]), 0) - 1)

    def read(self, *sources: _Reference) -> None:
        self.events.append(Read(tuple(self.content(source.place) for source in sources)))

    def write(self, target: _Reference) -> None:
        """The Hopper kernels write blocks of 64 columns, and the kernel that pulls rows writes a whole stage."""
        part = int(target.index[2].start) // 64 if target.index[1:] else None
        if part is None:
            self.written[target.place] = -2 - len(self.events)
        self.events.append(Write(*self.content(target.place), part))


_recorders: list[_Recorder] = []


def _recorder() -> _Recorder:
    return _recorders[-1]


def record(launch: Callable[[], Any], *, blocks: int = 1, ranks: int = 1, warps: int = 1) -> Kernel:
    """Return the events of each agent of a kernel.

    Args:
        launch: a call of the function that launches the kernel.
        blocks: the number of blocks of the grid. Of a grid of clusters there is one cluster, with all its blocks.
        ranks: the number of GPUs.
        warps: the number of agents into which a warpgroup that multiplies is divided.
    """
    agents: list[Agent] = []
    arrivals: dict[str, Arrivals] = {}

    def kernel(
        body: Any,
        *,
        out_type: Any,
        num_threads: int = 1,
        cluster: Any = (),
        scratch_types: Any = (),
        **_: Any,
    ) -> Any:
        def run_agent(rank: int, block: int, thread: int, operands: list[Any]) -> None:
            grid = {"block": 0, "partner": block} if cluster else {"block": block}
            _recorders.append(_Recorder(grid | {"warpgroup": thread, "rank": rank}))
            names = list(inspect.signature(body).parameters)[len(operands) :]
            pairs = zip(names, scratch_types, strict=False)
            body(*operands, *(_scratch(name, kind, arrivals) for name, kind in pairs))
            own = warps if thread < num_threads - 1 else 1
            events = _recorders.pop().events
            agents.extend(Agent(rank, block, events, warp, own) for warp in range(own))

        def call(*arrays: jax.Array) -> Any:
            # Group offsets and the numbers of rows decide what is done.
            operands: list[Any] = [
                array if jnp.issubdtype(array.dtype, jnp.integer) else _Reference("operand", array.shape)
                for array in arrays
            ]
            outs = jax.tree.leaves(out_type)
            operands += [_Reference("out", out.shape) for out in outs]
            for rank in range(ranks):
                for block in range(cluster[0] if cluster else blocks):
                    for thread in range(num_threads):
                        run_agent(rank, block, thread, operands)
            return jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_type)

        return call

    def run_scoped(function: Any, *scratch: Any, collective_axes: Any = None, **more: Any) -> Any:
        del collective_axes
        kinds = dict(zip(inspect.signature(function).parameters, scratch, strict=False)) | more
        return function(**{name: _scratch(name, kind, arrivals) for name, kind in kinds.items()})

    sizes = {"rank": ranks, "block": blocks}
    fakes = [
        (plgpu, "kernel", kernel),
        (pl, "run_scoped", run_scoped),
        (jax.lax, "axis_index", lambda axis: jnp.int32(_recorder().numbers[axis])),
        (jax.lax, "axis_size", sizes.get),
        (jax.lax, "fori_loop", _loop),
        *_OPERATIONS,
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, fake in fakes:
            stack.enter_context(mock.patch.object(owner, name, fake))
        stack.enter_context(jax.disable_jit())
        launch()
    return Kernel(agents, arrivals)


def _scratch(name: str, kind: Any, arrivals: dict[str, Arrivals]) -> Any:
    """Return a reference to an allocation, or references to a list of them."""
    if isinstance(kind, list):
        return [_scratch(f"{name} {number}", one, arrivals) for number, one in enumerate(kind)]
    if isinstance(kind, plgpu.ACC):
        return {...: jnp.float32(0)}
    if isinstance(kind, plgpu.Barrier | plgpu.ClusterBarrier):
        arrivals[name] = Arrivals(kind.num_arrivals, isinstance(kind, plgpu.ClusterBarrier))
    return _Reference(name, getattr(kind, "shape", ()))


def _loop(lower: Any, upper: Any, body: Callable[..., Any], value: Any) -> Any:
    for index in range(int(lower), int(upper)):
        value = body(jnp.int32(index), value)
    return value


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _load(source: _Reference, *, layout: Any, **_: Any) -> Any:
    """Record that scales of rows are read from a buffer. Blocks are loaded only to be written back, which is recorded;
    arrays in global memory have no barriers."""
    if layout == plgpu.Layout.WGMMA:
        return np.zeros((64, 64), np.float32)
    if source.name.startswith("buffers"):
        _recorder().read(source)
    return np.zeros(64, np.float32)


def _peer(rows: _Reference, device: dict[str, jax.Array]) -> _Reference:
    return _Reference("peer", rows.shape, rank=int(device["rank"]))


_OPERATIONS = [
    (plgpu, "barrier_wait", lambda barrier: _recorder().wait(barrier)),
    (plgpu, "barrier_arrive", lambda barrier: _recorder().arrive(barrier)),
    (plgpu, "copy_gmem_to_smem", lambda *operands, **axes: _recorder().copy(*operands, **axes)),
    (plgpu, "copy_smem_to_gmem", lambda source, target: _recorder().read(source)),
    (plgpu, "wait_smem_to_gmem", lambda left, **_: _recorder().events.append(Finish(left))),
    (plgpu, "wgmma", lambda accumulator, a, b: _recorder().read(a, b)),
    (plgpu, "wgmma_wait", lambda left: _recorder().events.append(Finish(left))),
    (plgpu, "commit_smem", lambda: _recorder().events.append(Sync())),
    (plgpu, "remote_ref", _peer),
    (
        pl,
        "semaphore_signal",
        lambda _, count, device_id: _recorder().events.append(Signal(int(device_id["rank"]))),
    ),
    (pl, "semaphore_wait", lambda _, value, decrement: _recorder().events.append(AwaitSignals(value))),
    (plgpu, "set_max_registers", _nothing),
    (plgpu, "load", _load),
    (plgpu, "layout_cast", lambda value, _: value),
    (plgpu, "broadcasted_iota", lambda *_, **__: np.zeros((64, 64), np.int32)),
    # Outputs go through buffers of each warpgroup's own.
    (row_product_kernel, "_write_outputs", _nothing),
    (weight_gradient_kernel, "write_output", _nothing),
]
