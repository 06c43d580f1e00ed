"""``python -m experiments.bench_gpu``: the Hopper kernels checked, then timed beside their peers, on one GPU.

Three products and the whole grouped MLP at the shapes of named models, over group sizes of real plans, before (static)
and after balancing (ReLibra): those of one rank, the one that is given most copies, in as many micro-batches and layers
as fill the model's slots on one rank of eight, scaled to a mean of rows a group. A rate counts only rows that exist.
The roofline is the smaller of a dense matmul's rate and of what memory allows when every operand moves once, both
measured in the same run. Then the stragglers: the sum over micro-batches and layers of the slowest rank's grouped MLP.

A program calls an operation on sets of operands in turn, so that none is found in a cache, and readings are long
enough to hide how programs are started. An operation's programs compile side by side before any of them runs; its lines
are printed, and recorded, as soon as they are there. Needs a Hopper GPU and an environment that sees it (``pip install
-e ".[cuda,dev]"``); kernels that were not installed or refuse a shape have no number.
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

# PyTorch wants memory of the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments import gpu_peers
from experiments.bench import interleaved
from relibra_jax.cli.traces import read_trace
from experiments.contenders import Work, contenders
from pallas_kernels import grouped_dot, grouped_mlp, grouped_outer
from pallas_kernels.implementation import why_not_hopper
from pallas_kernels.hopper.tile_sizes import MODELS, RANKS, REPLICAS, ModelShape
from relibra_jax.types import Topology

OURS, DENSE, UNFUSED = "ours", "dense matmul", "products one at a time"
IMPLEMENTATION: str = "mosaic"
"""What is measured."""
SETS: Final = 2
"""Sets of operands that one program works on."""
PATTERNS: Final = ((640, 256), (8192, 1024))
"""Rows and width at which all patterns of empty groups are checked: for small tiles, and for large ones."""
TOLERANCE: Final = 0.02
"""Of the largest entry: what bfloat16 explains where hidden rows are rounded in between."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchGpu:
    """Check and time the Hopper kernels."""

    trace: Annotated[Path | None, tyro.conf.Positional] = None
    """A trace (.npz); else the one that RELIBRA_TRACE names, else the recorded one of this project."""
    models: tuple[str, ...] = tuple(MODELS)
    """Whose shapes: names in `pallas_kernels.hopper.tile_sizes.MODELS`."""
    rows: tuple[int, ...] = (256, 1024, 2048)
    """Mean rows a group."""
    repeats: int = 15
    """Readings of each; the median counts."""
    micro_batches: int = 4
    """Of the trace, for plans and stragglers."""
    layers: int = 2
    """Likewise."""
    record: Path | None = None
    """A text file that what is printed is added to."""

    def __post_init__(self) -> None:
        for name in ("repeats", "micro_batches", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.rows or min(self.rows) < 1:
            raise ValueError(f"rows={self.rows} must be numbers of at least 1")
        if not self.models:
            raise ValueError(f"models: name some of {', '.join(MODELS)}")
        if unknown := set(self.models) - set(MODELS):
            raise ValueError(f"models: {', '.join(sorted(unknown))} not among {', '.join(MODELS)}")


class Operands(NamedTuple):
    """One set."""

    x: jax.Array
    """``[r, k]``."""
    d_out: jax.Array
    """Of the operation's result."""
    home: jax.Array
    """``[H, (3,) k, n]``."""
    replica: jax.Array
    joint: jax.Array | None
    """Both in one buffer, as peers want them; of products alone."""
    apart: list[tuple[jax.Array, jax.Array]]
    """Home and replica slots of each of an MLP's matrices, for products one at a time."""
    one: list[jax.Array]
    """``[k, n]``: what a dense layer has."""


type Call = Callable[[Operands, jax.Array], Any]


class Operation(NamedTuple):
    """One table: what is computed, by all who can."""

    name: str
    calls: dict[str, Call]
    """``(operands, group sizes) -> result``; ours and a dense one among them."""
    flops: Callable[[np.ndarray], float]
    bytes: Callable[[np.ndarray], float]
    """That have to move at least: every operand and result once."""
    reference: Call
    """What ours has to agree with: the blocked path, which tests hold to float64 results."""


def plan_sizes(works: Mapping[str, Work], topology: Topology, homes: int, mean: int) -> dict[str, np.ndarray]:
    """Group sizes ``[homes + REPLICAS]`` as plans give them to one rank, with the wanted mean.

    From the micro-batch, layer and rank with the most rows in replica slots on, that rank's micro-batches and layers
    follow each other until all slots have a size, again from the start if need be.
    """

    def by_rank(name: str) -> np.ndarray:
        quota = np.asarray(works[name].plan.quota)
        return quota.reshape(-1, topology.num_ranks, topology.slots).swapaxes(0, 1)

    copied = by_rank("relibra")[..., topology.home_slots :].sum(-1)
    rank, first = np.unravel_index(copied.argmax(), copied.shape)
    sizes = {}
    for name in ("static", "relibra"):
        quota = np.roll(by_rank(name)[rank], -first, axis=0)
        own = np.resize(quota[:, : topology.home_slots], homes)
        copies = np.resize(quota[:, topology.home_slots :], REPLICAS)
        sizes[name] = scaled_sizes(np.concatenate([own, copies]), mean)
    return sizes


def scaled_sizes(quota: np.ndarray, mean: int) -> np.ndarray:
    """Group sizes ``[S]`` in the same proportions, with the wanted mean; rows are rounded down.

    >>> scaled_sizes(np.array([1, 0, 3]), 100).tolist()
    [75, 0, 225]
    """
    return (quota * (mean * quota.size / max(quota.sum(), 1))).astype(np.int32)


def roofline_seconds(operation: Operation, sizes: np.ndarray, dense_rate: float, bandwidth: float) -> float:
    """The least time that this GPU has been seen to need for as many operations or bytes.

    >>> slow_memory = Operation("", {}, lambda sizes: 6e12, lambda sizes: 1e9, lambda *_: None)
    >>> roofline_seconds(slow_memory, np.array([1]), dense_rate=6e14, bandwidth=2e10)
    0.05
    """
    return max(operation.flops(sizes) / dense_rate, operation.bytes(sizes) / bandwidth)


def buffer_rows(sizes: Sequence[np.ndarray]) -> int:
    """Rows of a buffer that holds any of these groups: a multiple of 8, as a step's buffers are.

    >>> buffer_rows([np.array([5, 0, 6]), np.array([1, 1, 1])])
    16
    """
    return -(-max(int(one.sum()) for one in sizes) // 8) * 8


def array(*shape: int, seed: int = 0) -> jax.Array:
    """Normal bfloat16 of the size of trained weights."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) / math.sqrt(shape[-1])


def operand_sets(matrix: tuple[int, ...], rows: int, homes: int, columns: int) -> list[Operands]:
    """`SETS` of them; ``matrix`` is ``(k, n)`` or ``(3, D, F)``, and results have ``columns``."""
    sets = []
    for seed in range(SETS):
        weights = array(homes + REPLICAS, *matrix, seed=3 * seed)
        x = array(rows, matrix[-2], seed=3 * seed + 1)
        d_out = array(rows, columns, seed=3 * seed + 2)
        home, replica, parts = weights[:homes], weights[homes:], range(3 if len(matrix) == 3 else 0)
        apart = [(home[:, part], replica[:, part]) for part in parts]
        one = [weights[0, part] for part in parts] or [weights[0]]
        sets.append(Operands(x, d_out, home, replica, None if apart else weights, apart, one))
    return sets


def products(shape: ModelShape) -> Iterator[Operation]:
    """Forward, input gradient and weight gradient of the gate product."""
    k, n = shape.width, shape.expert_width

    def forward(name: str, one: Operands, sizes: jax.Array) -> jax.Array:
        return grouped_dot(one.x, one.home, one.replica, sizes, implementation=name)

    def input_gradient(name: str, one: Operands, sizes: jax.Array) -> jax.Array:
        return grouped_dot(one.d_out, one.home, one.replica, sizes, transposed=True, implementation=name)

    def weight_gradient(name: str, one: Operands, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        return grouped_outer(one.x, one.d_out, sizes, home_slots=one.home.shape[0], implementation=name)

    ours: dict[str, Callable[..., Any]] = {
        "forward": forward,
        "input gradient": input_gradient,
        "weight gradient": weight_gradient,
    }
    dense: dict[str, Call] = {
        "forward": lambda one, _: one.x @ one.one[0],
        "input gradient": lambda one, _: one.d_out @ one.one[0].T,
        "weight gradient": lambda one, _: one.x.T @ one.d_out,
    }

    def flops(sizes: np.ndarray) -> float:
        return 2.0 * int(sizes.sum()) * k * n

    for name in gpu_peers.PRODUCTS:

        def moved(sizes: np.ndarray, name: str = name) -> float:
            matrices = sizes.size if name == "weight gradient" else int((sizes > 0).sum())
            return 2.0 * (int(sizes.sum()) * (k + n) + matrices * k * n)

        calls: dict[str, Call] = {OURS: functools.partial(ours[name], IMPLEMENTATION), DENSE: dense[name]}
        for peer, call in gpu_peers.calls(name).items():
            calls[peer] = functools.partial(_in_one_buffer, call)
        yield Operation(name, calls, flops, moved, functools.partial(ours[name], "xla"))


def _in_one_buffer(call: gpu_peers.Call, one: Operands, sizes: jax.Array) -> jax.Array:
    return call(one.x, one.d_out, one.joint, sizes)


def mlps(shape: ModelShape) -> Iterator[Operation]:
    """The grouped MLP, and the same as products one at a time: what fusing them is worth."""
    k, n = shape.width, shape.expert_width

    def fused(name, x, scale, weights, sizes):
        home, replica = weights
        return grouped_mlp(x, home, replica, sizes, scale, implementation=name)

    def unfused(x, scale, weights, sizes):
        dot = functools.partial(grouped_dot, group_sizes=sizes, implementation=IMPLEMENTATION)
        gate, up, down = weights
        hidden = (jax.nn.silu(dot(x, *gate)) * dot(x, *up)).astype(x.dtype)
        return dot(hidden, *down, transposed=True) * scale[:, None].astype(x.dtype)

    def dense(x, scale, weights, sizes):
        gate, up, down = weights
        return ((jax.nn.silu(x @ gate) * (x @ up)) @ down.T) * scale[:, None].astype(x.dtype)

    calls: dict[str, tuple[Callable[..., Any], Callable[[Operands], Any]]] = {
        OURS: (functools.partial(fused, IMPLEMENTATION), lambda one: (one.home, one.replica)),
        UNFUSED: (unfused, lambda one: one.apart),
        DENSE: (dense, lambda one: one.one),
        "xla": (functools.partial(fused, "xla"), lambda one: (one.home, one.replica)),
    }

    def forward(call, weights, one: Operands, sizes):
        return call(one.x, jnp.ones(one.x.shape[0], jnp.float32), weights(one), sizes)

    def with_gradients(call, weights, one: Operands, sizes):
        operands = one.x, jnp.ones(one.x.shape[0], jnp.float32), weights(one)
        out, pull = jax.vjp(functools.partial(call, sizes=sizes), *operands)
        return out, *pull(one.d_out)

    def flops(sizes: np.ndarray) -> float:
        return 6.0 * int(sizes.sum()) * k * n

    def moved(sizes: np.ndarray) -> float:
        return 2.0 * (2 * int(sizes.sum()) * k + 3 * int((sizes > 0).sum()) * k * n)

    # That ours computes gate and up again counts as time, not as work. Empty groups have gradients too.
    def moved_both(sizes: np.ndarray) -> float:
        return 2.0 * (4 * int(sizes.sum()) * k + 3 * (int((sizes > 0).sum()) + sizes.size) * k * n)

    for name, run, work, least in (
        ("MLP forward", forward, flops, moved),
        ("MLP with gradients", with_gradients, lambda sizes: 3 * flops(sizes), moved_both),
    ):
        done: dict[str, Call] = {peer: functools.partial(run, *call) for peer, call in calls.items()}
        yield Operation(name, done, work, least, done.pop("xla"))


type Program = Callable[[list[Operands], jax.Array], list[Any]]


def compile_all(
    operation: Operation, sets: list[Operands], sizes: jax.Array, console: Console
) -> dict[str, Program]:
    """A program for each call, over all sets; peers that refuse are named and left out."""

    def compile_one(call: Call) -> Program:
        # Under a jit of its own, a call is lowered once for all sets.
        call = jax.jit(call)

        def in_turn(sets: list[Operands], sizes: jax.Array) -> list[Any]:
            results: list[Any] = []
            for one in sets:
                # One after the other, so that they share temporary memory.
                one, results = jax.lax.optimization_barrier((one, results))
                results = [*results, call(one, sizes)]
            return results

        return jax.jit(in_turn).lower(sets, sizes).compile()

    with ThreadPoolExecutor() as pool:
        futures = {name: pool.submit(compile_one, call) for name, call in operation.calls.items()}
    programs = {}
    for name, future in futures.items():
        try:
            program = future.result()
            jax.block_until_ready(program(sets, sizes))
        # Each refuses in its own way.
        except Exception as error:
            if name in (OURS, DENSE):
                raise
            said = (str(error) or repr(error)).splitlines()[0][:100]
            console.print(f"{name}, {operation.name}: {said}", markup=False)
        else:
            programs[name] = program
    return programs


def assert_close(name: str, ours: Any, theirs: Any) -> None:
    """Every array of two results, the largest entry for scale.

    Raises:
        AssertionError: a result is off by more than bfloat16 explains, or not a number.
    """
    for found, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        off, largest = (float(one) for one in _distance(found, wanted))
        assert off <= TOLERANCE * largest, f"{name}: off by {off:.3g}, the largest entry is {largest:.3g}"


@jax.jit
def _distance(found: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    difference = found.astype(jnp.float32) - wanted.astype(jnp.float32)
    return jnp.max(jnp.abs(difference), initial=0), jnp.max(jnp.abs(wanted), initial=0)


def check_patterns(rows: int, width: int) -> int:
    """All 2^8 patterns of empty groups, sizes of no tile, padding that is not a number: one program each.

    Returns:
        How many results were compared with the blocked path's.

    Raises:
        AssertionError: a result is off.
    """
    homes, replicas = 6, 2
    draw = np.random.default_rng(0)

    def products(implementation, x, dy, home, replica, sizes):
        def dot(x, home, replica):
            return grouped_dot(x, home, replica, sizes, implementation=implementation)

        out, pull = jax.vjp(dot, x, home[:, 0], replica[:, 0])
        return out, *pull(dy)

    def mlp(implementation, x, dy, home, replica, sizes):
        def call(x, home, replica, scale):
            return grouped_mlp(x, home, replica, sizes, scale, implementation=implementation)

        scale = jnp.linspace(0.5, 2, rows, dtype=jnp.float32)
        out, pull = jax.vjp(call, x, home, replica, scale)
        return out, *pull(dy)

    shapes = (rows, width), (rows, width), (homes, 3, width, width), (replicas, 3, width, width)
    arrays = [array(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    compared = 0
    for check in (products, mlp):
        ours, blocked = (jax.jit(functools.partial(check, name)) for name in (IMPLEMENTATION, "xla"))
        for pattern in itertools.product((0, 1), repeat=homes + replicas):
            sizes = draw.multinomial(rows - 5, np.ones(8) / 8).astype(np.int32) * np.array(pattern, np.int32)
            beyond = np.arange(rows)[:, None] >= sizes.sum()
            x, dy = (jnp.where(beyond, jnp.nan, one) for one in arrays[:2])
            operands = (x, dy, *arrays[2:], jnp.asarray(sizes))
            assert_close(f"{check.__name__} of groups {sizes.tolist()}", ours(*operands), blocked(*operands))
            compared += 1
    return compared


def seconds(
    runs: Mapping[Any, Callable[[], Any]], repeats: int, *, reading: float = 0.02
) -> dict[Any, float]:
    """Median seconds of one run, all taking turns; as many runs in a reading as take ``reading`` seconds."""

    def several(run: Callable[[], Any], count: int) -> Any:
        for _ in range(count - 1):
            run()
        return run()

    counts = {}
    for name, run in runs.items():
        jax.block_until_ready(run())
        start = time.perf_counter()
        jax.block_until_ready(run())
        counts[name] = math.ceil(reading / (time.perf_counter() - start))
    flights = {name: functools.partial(several, run, counts[name]) for name, run in runs.items()}
    return {name: value / counts[name] for name, value in interleaved(flights, repeats=repeats).items()}


def copy_bandwidth(repeats: int) -> float:
    """Bytes a second, read and written, of a copy of 2 GB."""
    ones = jnp.ones(2**30, jnp.bfloat16)
    copy = jax.jit(lambda array: array + 1)
    return 2 * ones.nbytes / seconds({"copy": lambda: copy(ones)}, repeats)["copy"]


def stragglers(works: Mapping[str, Work], topology: Topology, shape: ModelShape, repeats: int) -> dict[str, float]:
    """Sum over micro-batches and layers of the slowest rank's grouped MLP with gradients, by contender."""
    total = {}
    for name, work in works.items():
        quota = np.asarray(work.plan.quota).reshape(-1, topology.num_ranks, topology.slots)
        x = array(work.sizes.rows, shape.width)
        weights = array(topology.slots, 3, shape.width, shape.expert_width, seed=2)
        home, replica = weights[: topology.home_slots], weights[topology.home_slots :]

        @jax.jit
        def step(x, home, replica, sizes):
            def call(x, home, replica):
                return grouped_mlp(x, home, replica, sizes, implementation=IMPLEMENTATION)

            out, pull = jax.vjp(call, x, home, replica)
            return pull(out)

        runs = {
            place: functools.partial(step, x, home, replica, jnp.asarray(quota[place]))
            for place in np.ndindex(quota.shape[:2])
        }
        slowest: dict[int, float] = {}
        for (row, _), value in seconds(runs, repeats, reading=0.004).items():
            slowest[row] = max(slowest.get(row, 0.0), value)
        total[name] = sum(slowest.values())
    return total


def measure(
    operation: Operation,
    sets: list[Operands],
    plans: Mapping[str, np.ndarray],
    dense_rates: dict[str, float],
    bandwidth: float,
    config: BenchGpu,
    console: Console,
) -> Iterator[tuple[str, ...]]:
    """Lines of a table: one operation, checked and timed with each plan's group sizes.

    ``dense_rates`` holds the rate of a dense matmul with each plan's rows, once a product has found it.
    """
    programs = compile_all(operation, sets, jnp.asarray(next(iter(plans.values()))), console)
    reference = jax.jit(operation.reference)
    for plan, sizes in plans.items():
        on_device = jnp.asarray(sizes)
        runs = {name: functools.partial(program, sets, on_device) for name, program in programs.items()}
        assert_close(f"{operation.name}, {plan}", runs[OURS]()[0], reference(sets[0], on_device))
        times = {name: value / SETS for name, value in seconds(runs, config.repeats).items()}
        if product := next((name for name in gpu_peers.PRODUCTS if name == operation.name), None):
            dense_rates[plan] = operation.flops(sizes) / times[DENSE]
            k, n = sets[0].home.shape[-2:]
            times |= gpu_peers.torch_seconds(product, (k, n), sizes, sets=SETS, repeats=config.repeats)
        best = roofline_seconds(operation, sizes, dense_rates[plan], bandwidth)
        for name, value in times.items():
            rate = f"{operation.flops(sizes) / value / 1e12:.0f}"
            yield plan, name, f"{value * 1e3:.3f}", rate, f"{best / value:.0%}"


def measure_model(
    model: str,
    works: Mapping[str, Work],
    topology: Topology,
    bandwidth: float,
    config: BenchGpu,
    console: Console,
) -> Iterator[None]:
    """Print a model's tables, and come back after each."""
    shape = MODELS[model]
    homes, matrix = shape.experts // RANKS, (shape.width, shape.expert_width)
    for mean in config.rows:
        plans = plan_sizes(works, topology, homes, mean)
        rows = buffer_rows(list(plans.values()))
        rates: dict[str, float] = {}
        for operations, whole, columns in (
            (products(shape), matrix, shape.expert_width),
            (mlps(shape), (3, *matrix), shape.width),
        ):
            sets = operand_sets(whole, rows, homes, columns)
            for operation in operations:
                console.print(f"{model}, {homes}+{REPLICAS} slots, {mean} rows a group: {operation.name}")
                table = Table("plan", "by", "ms", "TFLOP/s", "of the roofline")
                for line in measure(operation, sets, plans, rates, bandwidth, config, console):
                    table.add_row(*line)
                console.print(table)
                yield


def versions() -> str:
    """What was measured with, and when."""
    found = [f"{datetime.date.today().isoformat()}: {jax.devices()[0].device_kind}"]
    for package in ("jax", "jaxlib", "tokamax", "torch"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def main(config: BenchGpu) -> int:
    """Print the tables; 1 where there is no Hopper GPU."""
    console = Console(record=config.record is not None, width=None if sys.stdout.isatty() else 120)

    def keep() -> None:
        if config.record:
            config.record.parent.mkdir(parents=True, exist_ok=True)
            with config.record.open("a") as file:
                file.write(console.export_text())

    if reason := why_not_hopper(jax.devices()[0].device_kind):
        console.print(f"bench_gpu measures the Hopper kernels: {reason}. No number is printed.")
        return 1
    trace = read_trace(config.trace)
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=trace.num_experts, replica_slots=REPLICAS)
    works = contenders(
        trace, topology, micro_batches=config.micro_batches, samples_per_rank=4, layers=config.layers
    )
    compared = sum(check_patterns(*size) for size in PATTERNS)
    console.print(f"{compared} patterns of group sizes: results and gradients agree with the blocked path's")
    bandwidth = copy_bandwidth(config.repeats)
    console.print(f"{versions()}; {trace.name}; a copy moves {bandwidth / 1e12:.2f} TB/s")
    keep()
    for model in config.models:
        for _ in measure_model(model, works, topology, bandwidth, config, console):
            keep()
        total = stragglers(works, topology, MODELS[model], config.repeats)
        found = ", ".join(f"{name} {value * 1e3:.2f}" for name, value in total.items())
        console.print(f"{model}, slowest ranks, ms: {found}")
        keep()
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(BenchGpu, description=__doc__)))
