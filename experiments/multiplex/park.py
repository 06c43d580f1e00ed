"""``python -m experiments.multiplex.park FOLDER``: measure how a run's state moves to host memory and back.

It makes the state with which the run in a folder began, on the devices of this machine, and moves it several times: the
policy's weights, which a rollout needs, and the whole state, which training needs. The arrays keep their shardings, and
their old buffers are freed after every move. On a CPU "devices" and host share one memory, so a move is a copy inside
it; on GPUs it goes over PCIe or C2C, to and from pinned memory.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from rich.console import Console

from experiments.multiplex.parking import PARKING_FILE, Move, Parking
from experiments.program import run_program
from experiments.rl.configs import Train
from experiments.rl.devices import copies_of_group, host_devices
from experiments.rl.run_folder import saved_config
from experiments.rl.state import State
from relibra_jax.execution.memory import HOST
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.limits import check_integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Park:
    """Measure the bytes and seconds of parking a run in host memory."""

    folder: tyro.conf.Positional[Path]
    """The folder of the run, to which the numbers are written."""
    repeats: int = 7
    """The number of moves in each direction, of which the median counts."""


def main(options: Park) -> None:
    """Measure the moves of a run, print them, and write them into its folder.

    Args:
        options: the folder and the number of moves.

    Raises:
        ValueError: if the folder has no run, ``repeats`` is not at least 1, or there are fewer devices than ranks.
    """
    check_integer("repeats", options.repeats, least=1)
    parking = measure_parking(saved_config(options.folder), repeats=options.repeats)
    write_json(options.folder / PARKING_FILE, parking.numbers())
    for name, move in (("weights", parking.weights), ("whole state", parking.state)):
        rates = (
            f"{seconds * 1e3:.3g} ms ({move.bytes / seconds / 1e9:.2f} GB/s)"
            for seconds in (move.out_seconds, move.back_seconds)
        )
        Console().print(
            f"{name}: {move.bytes / 1e6:.2f} MB, {' out, '.join(rates)} back; measured on {parking.devices} x"
            f" {parking.device}",
            highlight=False,
            soft_wrap=True,
        )


def measure_parking(config: Train, *, repeats: int) -> Parking:
    """Measure how the state of a run moves to host memory and back.

    Args:
        config: the settings of the run. Its state begins on the devices, even if the run keeps a part in host memory.
        repeats: the number of moves in each direction.

    Raises:
        ValueError: if there are fewer devices than ranks, or `State` rejects the settings.
    """
    config = dataclasses.replace(config, state_memory="device")
    if config.reference.kind != "none":
        config = dataclasses.replace(config, reference=dataclasses.replace(config.reference, memory="device"))
    devices = host_devices(config.num_ranks)
    mesh = expert_mesh(config.topology, devices=devices, **copies_of_group(config.data, config.fsdp))
    state = State(config, config.seeds[0], mesh)
    if config.reference.kind != "none":
        state.keep_reference()
    weights = _arrays(state.agent)
    modules = (state.optimizer, state.critic, state.critic_optimizer, state.reference)
    others = [array for module in modules if module is not None for array in _arrays(module)]
    weights, of_weights = move_arrays(weights, repeats=repeats)
    _, of_state = move_arrays([*weights, *others], repeats=repeats)
    return Parking(of_weights, of_state, device=devices[0].device_kind, devices=len(devices))


def move_arrays(arrays: Sequence[jax.Array], *, repeats: int) -> tuple[list[jax.Array], Move]:
    """Move arrays to host memory and back several times, and free the old buffers each time.

    Args:
        arrays: the arrays, which are deleted.
        repeats: the number of moves in each direction.

    Returns:
        The arrays in their first memory, and the bytes and median seconds of the moves.
    """
    kinds, seconds = [str(array.sharding.memory_kind) for array in arrays], []
    moved = list(arrays)
    for _ in range(repeats):
        for to in ([HOST] * len(kinds), kinds):
            began = time.perf_counter()
            parked = [
                jax.device_put(array, array.sharding.with_memory_kind(kind))
                for array, kind in zip(moved, to, strict=True)
            ]
            jax.block_until_ready(parked)
            seconds.append(time.perf_counter() - began)
            for array in moved:
                array.delete()
            moved = parked
    size = sum(shard.data.nbytes for array in moved for shard in array.addressable_shards)
    return moved, Move(size, statistics.median(seconds[::2]), statistics.median(seconds[1::2]))


def _arrays(module: nnx.Module | nnx.Optimizer) -> list[jax.Array]:
    """Return the arrays of a module, without counts and random keys."""
    leaves = jax.tree.leaves(nnx.state(module))
    return [leaf for leaf in leaves if leaf.ndim and jnp.issubdtype(leaf.dtype, jnp.floating)]


if __name__ == "__main__":
    sys.exit(run_program(main, Park))
