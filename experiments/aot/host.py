"""The check of layers whose replicas come from host memory: copies beside attention, and the bytes of both ways.

Described devices have no memories, so each program first moves what is kept to host memory.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.bytes import array_bytes, count_sent
from experiments.aot.findings import Finding, print_findings, read_compiled
from experiments.aot.stack import FAST_COMPILATION, Layer, input_shapes, loss, parameter_shapes, plan_shapes
from experiments.aot.ways import EXPERT, MODEL, TOPOLOGY, parallel_of
from relibra_jax.execution import OVERLAP_OPTIONS, prepare_host
from relibra_jax.execution.memory import to_host
from relibra_jax.execution.mesh import RANKS
from relibra_jax.execution.residents import Residents
from relibra_jax.routing.host_share import HostShare, HostSizes
from relibra_jax.routing.resident_push import PushSizes

LAYERS: Final = 4
KEPT: Final = 5
"""K, the number of experts that a rank keeps for each layer."""
_PUSH: Final = PushSizes(exports=KEPT, pair=0, own=4 * KEPT)


class Case(NamedTuple):
    """One program to compile."""

    name: str
    sizes: HostSizes
    """The replicas on both ways."""
    backward: bool
    """Whether the program computes gradients."""

    @property
    def passes(self) -> int:
        """The number of passes in which weights arrive."""
        return 1 + self.backward


CASES: Final = (
    Case(
        "recompute, all from host",
        HostSizes(copies=2, links=0, exports=0, export_copies=0, push=_PUSH),
        False,
    ),
    Case(
        "update, one of two from host",
        HostSizes(copies=1, links=1, exports=1, export_copies=1, push=_PUSH),
        True,
    ),
)


class HostMeasured(NamedTuple):
    """The measurements of a program."""

    copied: int
    """The bytes that a device copies from host memory."""
    beside: list[int]
    """The number of matrix products between start and done of each copy, 0 if it is not asynchronous."""
    linked: int
    """The bytes of replicas and their gradients that a device sends."""


def check_host() -> None:
    """Compile and check the programs."""
    print_findings(finding for case in CASES for finding in judge_host(case, measure_host(case)))


def measure_host(case: Case) -> HostMeasured:
    """Compile one program and measure it."""
    parallel = parallel_of("auto")
    program, _ = read_compiled(_compile(case))
    copies = list(program.host_copies())
    sent = count_sent(program.transfers(), parallel.mesh.shape)
    return HostMeasured(
        round(sum(copy.times * array_bytes(*copy.array) for copy in copies)),
        [sum(map(program.is_gemm, copy.between)) for copy in copies],
        sum(size for (content, _), size in sent.items() if content == "replicas"),
    )


def judge_host(case: Case, measured: HostMeasured) -> Iterator[Finding]:
    """Check the measurements of a program.

    Args:
        case: the program.
        measured: its measurements.
    """
    sizes, away = case.sizes, (TOPOLOGY.ranks_per_node - 1) / TOPOLOGY.ranks_per_node
    expected = LAYERS * case.passes * sizes.copies * EXPERT * 2
    yield Finding(
        case.name,
        f"MB from host memory: exactly {sizes.copies} experts a layer in {case.passes} passes",
        f"{measured.copied / 1e6:.1f}, expected {expected / 1e6:.1f}",
        measured.copied == expected,
    )
    yield Finding(
        case.name,
        "every copy from host memory is asynchronous, with matrix products between its start and its done",
        f"{measured.beside} products",
        len(measured.beside) == case.passes * sizes.copies and all(measured.beside),
    )
    # A padded fetch sends exports and replicas in pieces; all gradients return over links.
    returned = (2 + TOPOLOGY.replica_slots) if case.backward else 0
    experts = case.passes * (sizes.exports + sizes.links) + returned
    linked = round(LAYERS * experts * away * EXPERT * 2)
    yield Finding(
        case.name,
        "MB of replicas on links: exactly those of the rest and of gradients",
        f"{measured.linked / 1e6:.1f}, expected {linked / 1e6:.1f}",
        measured.linked == linked,
    )


def _compile(case: Case) -> jax.stages.Compiled:
    parallel = parallel_of("auto")
    params = parameter_shapes(MODEL, parallel, (LAYERS,), jnp.bfloat16)
    inputs = input_shapes(MODEL, parallel, (), LAYERS)
    nodes, local = parallel.ranks

    def shape(dims: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(parallel.mesh, PartitionSpec(None, *spec))
        return jax.ShapeDtypeStruct((LAYERS, *dims), dtype, sharding=sharding)

    kept = shape((nodes, local, KEPT, 3, MODEL.width, MODEL.expert_width), jnp.bfloat16, *RANKS)
    experts = shape((nodes, local, KEPT), jnp.int32)
    chosen = jax.ShapeDtypeStruct((1, LAYERS, nodes, local, TOPOLOGY.replica_slots), bool)
    shares: Any = chosen, jax.ShapeDtypeStruct(experts.shape, jnp.int32)
    tables = jax.eval_shape(
        lambda plans, share: prepare_host(plans, share, case.sizes, parallel),
        plan_shapes(parallel, (1, LAYERS)),
        HostShare(*shares),
    )
    tables = jax.tree.map(lambda leaf: shape(leaf.shape[2:], leaf.dtype, *RANKS), tables)

    def run(params: Layer, inputs: Any, kept: jax.Array, experts: jax.Array, tables: Any) -> jax.Array:
        prepared = inputs.prepared._replace(host_tables=tables, on_host=Residents(to_host(kept), experts))
        return loss(params, inputs.x, prepared, inputs.expert_ids, MODEL, parallel)

    step = jax.grad(run) if case.backward else run
    compiled = jax.jit(step, compiler_options={**OVERLAP_OPTIONS, **FAST_COMPILATION})
    return compiled.lower(params, inputs, kept, experts, tables).compile()
