"""A check that a ragged exchange is right and faster than others on this machine, run once and kept.

    python -m relibra_jax.execution.exchange_check [--nodes N] [--distributed]

``exchange="auto"`` takes a ragged exchange only where it has passed this check. Public reports say that it hangs,
crashes or is slow on some machines (openxla/xla#33386, #47283), and no test without several GPUs can show that it
works. The check runs a layer whose experts only multiply rows by their gates, forward and backward, with a ragged
exchange and with every other exchange that ``auto`` may take. The output and the gradients must be equal bit for bit,
twenty times over, and the median time of the ragged layer must be the shortest. It takes about a minute.

With several processes, run the command on all of them as the training runs, with ``--distributed``, which calls
`jax.distributed.initialize` without arguments. Or call `check_exchange` in a program that has initialised JAX,
before it makes its `ExpertParallel`.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pallas_kernels.compare import same_bits
from pallas_kernels.verdicts import Verdict
from relibra_jax.contract.types import LayerPlan, Topology
from relibra_jax.execution.exchange_verdicts import BEGAN, write_verdict
from relibra_jax.execution.mesh import LOCAL, NODE, OVERLAP_OPTIONS, expert_mesh, rank_sharding
from relibra_jax.execution.moe import moe_layer
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.plan_agreement import fail_together, processes_where
from relibra_jax.execution.prepared_layer import prepare_layer
from relibra_jax.execution.replicas import LayerExperts
from relibra_jax.routing.exchange_rules import AUTO, exchange_choices
from relibra_jax.routing.sizes import count_capacities, worst_case_capacities

TOP_K: Final = 8
EXPERTS_PER_RANK: Final = 8
REPEATS: Final = 20


def check_exchange(mesh: Mesh, *, tokens: int = 4096, width: int = 2048, exchange: str = "ragged") -> Verdict:
    """Check an exchange on the devices of a mesh, and keep the verdict for `ExpertParallel`.

    Every process must call it. If a process hangs or dies, the verdict is that the check did not end.

    Args:
        mesh: the mesh, with the axes node and local and no others.
        tokens: the number of tokens of a rank.
        width: D, the model width.
        exchange: the kind to check, ``ragged`` or, in tests, ``emulated``.

    Raises:
        OSError: if a process cannot write to the cache folder; on all processes.
    """
    with fail_together("the verdict on an exchange", OSError):
        write_verdict(mesh, BEGAN)
    drawn, reason = _draw(mesh, tokens, width), ""
    steps: dict[str, Callable[[], Any]] = {}
    for kind in (exchange, *exchange_choices(on_gpu=True)):
        try:
            steps[kind] = _step(mesh, kind, drawn)
        except Exception as error:
            reason = _one_line(error)
        # If one process cannot compile a layer, the others must not wait for it in what they run next.
        failed = processes_where(bool(reason))
        if failed.size:
            break
    else:
        try:
            reason = _why_not_right(steps, exchange) or _why_not_faster(steps, exchange)
        except Exception as error:
            reason = _one_line(error)
    failed = processes_where(bool(reason))
    if failed.size and not reason:
        reason = f"it failed on processes {failed.tolist()}"
    verdict = Verdict(not failed.size, reason)
    write_verdict(mesh, verdict)
    return verdict


class _Drawn(NamedTuple):
    """The layer that is run with every exchange, and its tokens."""

    topology: Topology
    x: np.ndarray
    ids: np.ndarray
    gates: np.ndarray
    plan: LayerPlan


def _draw(mesh: Mesh, tokens: int, width: int) -> _Drawn:
    nodes, local = mesh.shape[NODE], mesh.shape[LOCAL]
    topology = Topology(
        num_nodes=nodes, ranks_per_node=local, num_experts=EXPERTS_PER_RANK * nodes * local, replica_slots=0
    )
    draw = np.random.default_rng(0)
    scores = draw.normal(size=(topology.num_ranks, tokens, topology.num_experts))
    ids = np.argsort(scores, axis=-1)[..., :TOP_K].astype(np.int32)
    x = draw.normal(size=(*ids.shape[:2], width)).astype(jnp.bfloat16)
    gates = draw.uniform(0.5, 1, ids.shape).astype(np.float32)
    return _Drawn(topology, x, ids, gates, _plan(ids, topology))


def _step(mesh: Mesh, kind: str, drawn: _Drawn) -> Callable[[], Any]:
    """Return a function that runs a layer forward and backward with an exchange of this kind."""
    topology, plan, (tokens, width) = drawn.topology, drawn.plan, drawn.x.shape[1:]
    worst = worst_case_capacities(tokens, TOP_K, topology)
    capacities = replace(
        count_capacities(jax.tree.map(lambda leaf: leaf[None, None], plan), topology), node=worst.node
    )
    # On a single node, the layer whose bits are compared has to send copies as ragged exchanges do, one by one.
    path = "flat" if topology.num_nodes == 1 and kind != "fitted" else AUTO
    parallel = ExpertParallel(mesh=mesh, topology=topology, capacities=capacities, exchange=kind, path=path)
    place = functools.partial(_place, sharding=parallel.token_sharding)
    x, expert_ids, gates = map(place, (drawn.x, drawn.ids, drawn.gates))
    layer = jax.jit(prepare_layer, static_argnums=2)(expert_ids, plan, parallel)
    home = _place(
        np.zeros((*parallel.ranks, topology.home_slots, 3, width, 1), jnp.bfloat16), rank_sharding(mesh)
    )

    # As a run compiles its steps; XLA on CPUs does not have these options.
    options = OVERLAP_OPTIONS if mesh.devices.flat[0].platform in ("gpu", "cuda") else None

    @functools.partial(jax.jit, compiler_options=options)
    def step(x, gates, home, ids, layer):
        experts = LayerExperts(home, None, None, layer.slot_expert)

        def output(x, gates):
            return moe_layer(x, ids, gates, experts, layer, parallel, expert_mlp=_multiply).output

        out, pull = jax.vjp(output, x, gates)
        return out, *pull(out)

    arguments = x, gates, home, expert_ids, layer
    return functools.partial(step.lower(*arguments).compile(), *arguments)


def _plan(ids: np.ndarray, topology: Topology) -> LayerPlan:
    """Return the plan of a layer whose experts are at home in contiguous order."""
    ranks = topology.num_nodes, topology.ranks_per_node, -1
    load = np.stack([np.bincount(own.ravel(), minlength=topology.num_experts) for own in ids]).astype(
        np.int32
    )
    home = np.arange(topology.num_experts, dtype=np.int32)
    quota = load.sum(0, dtype=np.int32).reshape(ranks)
    return LayerPlan(*map(jnp.asarray, (home.reshape(ranks), home, quota, load.reshape(ranks))))


def _place(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _multiply(rows, weights, group_sizes, row_scale, *, implementation):
    """An `relibra_jax.execution.moe.ExpertMlp` that multiplies rows by their scales."""
    del weights, implementation
    real = (jnp.arange(len(rows), dtype=jnp.int32) < group_sizes.sum())[:, None]
    scaled = jnp.where(real, rows.astype(jnp.float32) * row_scale[:, None], 0)
    return scaled.astype(rows.dtype)


def _why_not_right(steps: dict[str, Callable[[], Any]], exchange: str) -> str:
    """Return the difference between the results of an exchange and of the padded one; empty if there is none."""
    expected = _own(steps["padded"]())
    for repeat in range(REPEATS):
        for name, result, right in zip(
            ("output", "gradient of x", "gradient of gates"), _own(steps[exchange]()), expected, strict=True
        ):
            if not same_bits(result, right):
                return f"run {repeat}: the {name} differs from that of exchange='padded'"
    return ""


def _why_not_faster(steps: dict[str, Callable[[], Any]], exchange: str) -> str:
    """Return the times of an exchange and of the fastest other one; empty if it is faster."""
    seconds = _median_seconds(steps)
    others = min(value for kind, value in seconds.items() if kind != exchange)
    if seconds[exchange] < others:
        return ""
    return f"it takes {seconds[exchange] * 1e3:.2f} ms and another {others * 1e3:.2f} ms"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _own(arrays: tuple[jax.Array, ...]) -> list[list[np.ndarray]]:
    """Return the parts of arrays that this process has."""
    return [[np.asarray(shard.data) for shard in array.addressable_shards] for array in arrays]


def _median_seconds(steps: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median time of each step, of interleaved runs."""
    for step in steps.values():
        jax.block_until_ready(step())
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(REPEATS):
        for kind, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step())
            times[kind].append(time.perf_counter() - start)
    return {kind: statistics.median(each) for kind, each in times.items()}


def main(arguments: list[str] | None = None) -> int:
    """Check all GPUs together; return 1 if the ragged exchange does not pass."""
    parser = argparse.ArgumentParser(
        prog="python -m relibra_jax.execution.exchange_check", description=__doc__
    )
    parser.add_argument("--nodes", type=int, default=1, help="the number of nodes")
    parser.add_argument("--distributed", action="store_true", help="call jax.distributed.initialize first")
    options = parser.parse_args(arguments)
    if options.distributed:
        jax.distributed.initialize()
    devices = jax.devices()
    local, rest = divmod(len(devices), options.nodes)
    if rest or local < 2 or devices[0].platform not in ("gpu", "cuda"):
        reason = f"{len(devices)} devices of platform {devices[0].platform!r} are not several GPUs on each of"
        print(f"exchange 'ragged': not checked, {reason} {options.nodes} nodes")
        return 0
    topology = Topology(
        num_nodes=options.nodes, ranks_per_node=local, num_experts=len(devices), replica_slots=0
    )
    verdict = check_exchange(expert_mesh(topology))
    if not jax.process_index():
        print(f"exchange 'ragged': {'passed' if verdict.passed else 'failed, ' + verdict.reason}")
    return int(not verdict.passed)


if __name__ == "__main__":
    sys.exit(main())
