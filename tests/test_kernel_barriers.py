"""The barriers of the Hopper kernels, and of the kernel that pulls rows, in every order in which agents can run.

`support.kernel_events` records what each agent does from the kernels' own code, and `support.gpu_machine` searches all
interleavings. None may have a deadlock, overwrite a buffer while it is read, read a buffer without its content, or
arrive at a block that has ended. Faults that are put into the recorded events must be found.
"""

import functools
from unittest import mock

import jax.numpy as jnp
import pytest
from support.gpu_machine import (
    Arrivals,
    Arrive,
    AwaitSignals,
    Copy,
    Fault,
    Finish,
    Machine,
    Signal,
    Sync,
    Wait,
    Write,
    count_states,
)
from support.kernel_events import Kernel, record

from pallas_kernels import pull_rows as pull_module
from pallas_kernels.hopper.persistent_kernel import STEP, TileSizes
from pallas_kernels.hopper.row_product_kernel import row_product_kernel
from pallas_kernels.hopper.tile_walk import group_offsets
from pallas_kernels.hopper.weight_gradient_kernel import weight_gradient_kernel
from pallas_kernels.products import BlockScales, Sweep

SUMS = {
    "product": [[Sweep(0, (0,))]],
    # As in the backward pass: the second sweep loads one matrix where the barrier expects two.
    "two sums": [[Sweep(0, (0, 1))], [Sweep(1, (2,))]],
    "one sum": [[Sweep(0, (0,)), Sweep(1, (1,))]],
}
GRADIENT = "weight gradient"
FLOAT8 = "float8"
KERNELS = [*SUMS, GRADIENT, FLOAT8]
ROWS = 80
SIZES = (5, 0, 70)
"""The rows of each group; padding follows. In tiles of 128 rows, some warpgroups and blocks have no row of a group."""


@functools.cache
def ring(name, height, stages, cluster, warps=1):
    """Return the events of one cluster that computes all tiles of a kernel, in sweeps of two steps."""
    tiles, offsets = TileSizes(height, 64, stages, cluster), group_offsets(jnp.array(SIZES), ROWS)

    def launch():
        if name == GRADIENT:
            a, b = (jnp.zeros((ROWS, width), jnp.bfloat16) for width in (tiles.cluster_height, tiles.width))
            return weight_gradient_kernel([(a, b)], offsets, (len(SIZES),), tiles=tiles)
        if name == FLOAT8:
            return row_product_kernel(
                [jnp.zeros((ROWS, 256), jnp.float8_e4m3fn)],
                [jnp.zeros((len(SIZES), 1, tiles.width, 256), jnp.float8_e4m3fn)],
                offsets,
                block_scales=BlockScales(jnp.zeros((2, ROWS)), jnp.zeros((len(SIZES), 1, 2))),
                sums=SUMS["product"],
                transposed=True,
                epilogue=lambda sums, _: (sums, None),
                padding=True,
                tiles=tiles,
            )
        return row_product_kernel(
            [jnp.zeros((ROWS, 2 * STEP), jnp.bfloat16)] * 2,
            [jnp.zeros((len(SIZES), 3, 2 * STEP, tiles.width), jnp.bfloat16)],
            offsets,
            sums=SUMS[name],
            transposed=False,
            epilogue=lambda sums, _: (sums, None),
            padding=True,
            tiles=tiles,
        )

    return record(launch, warps=warps)


@functools.cache
def pull(ranks, stages, blocks=1):
    """Return the events of some blocks that pull two rows of two chunks, and write zeros for a third."""
    rows = jnp.zeros((2, 2, 64, 128), jnp.bfloat16)
    rank, row = jnp.array([1, -1, 0]), jnp.array([0, -1, 1])

    def launch():
        with mock.patch.multiple(pull_module, BLOCKS=blocks, STAGES=stages):
            return pull_module.pull_rows(rank, row, rows, "rank", implementation="mosaic")

    return record(launch, blocks=blocks, ranks=ranks)


def search(kernel, *, coarse=True):
    return count_states(Machine(*kernel, coarse=coarse))


def long(*arguments):
    return pytest.param(*arguments, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("name", "height", "stages", "cluster"),
    [
        *((name, *sizes) for name in KERNELS for sizes in ((64, 3, 1), (128, 2, 1), (64, 2, 2))),
        *(long(name, *sizes) for name in KERNELS for sizes in ((128, 2, 2), (64, 3, 2))),
        *(long(name, 128, 3, 2) for name in ("product", GRADIENT)),
    ],
)
def test_rings_are_safe_in_every_order(name, height, stages, cluster):
    kernel = ring(name, height, stages, cluster)
    assert len(kernel.agents) == cluster * (height // 64 + 1)
    assert {agent.block for agent in kernel.agents} == set(range(cluster))
    assert search(kernel) > 20


@pytest.mark.parametrize(
    ("name", "height", "cluster"),
    [*((name, 64, 1) for name in KERNELS), *(long(name, 128, 1) for name in KERNELS), long("product", 64, 2)],
)
def test_rings_are_safe_event_by_event(name, height, cluster):
    """Without the reduction there are more states and the same result."""
    stages = 3 if (height, cluster) == (64, 1) else 2
    kernel = ring(name, height, stages, cluster)
    assert search(kernel, coarse=False) > search(kernel)


def without(kernel, leave_out):
    """Return a kernel without the events for which ``leave_out(event, agent, number of the event)`` is true."""

    def rest(agent):
        return [event for place, event in enumerate(agent.events) if not leave_out(event, agent, place)]

    return kernel._replace(agents=[agent._replace(events=rest(agent)) for agent in kernel.agents])


@pytest.mark.parametrize(
    ("name", "height", "stages"),
    [("two sums", 128, 2), (GRADIENT, 128, 2), ("product", 64, 3), (FLOAT8, 128, 2)],
)
def test_every_wait_arrival_and_copy_is_needed(name, height, stages):
    kernel = ring(name, height, stages, 1)
    for number, agent in enumerate(kernel.agents):
        for place, event in enumerate(agent.events):
            if isinstance(event, Wait | Arrive | Copy):
                agents = list(kernel.agents)
                agents[number] = agent._replace(events=[*agent.events[:place], *agent.events[place + 1 :]])
                with pytest.raises(Fault):
                    search(kernel._replace(agents=agents))


def test_weight_gradients_clear_every_column_once():
    for height in (64, 128):
        kernel = ring(GRADIENT, height, 2, 1)
        written = [event for agent in kernel.agents for event in agent.events if isinstance(event, Write)]
        assert len(written) == len(set(written))
        for name, width in (("buffers 0", height), ("buffers 1", 64)):
            contents = {(event.buffer, event.number) for event in written if event.buffer[0] == name}
            # Each of the two groups with rows begins or ends inside each of its steps.
            assert len(contents) == 3
            for content in contents:
                parts = {event.part for event in written if event[:2] == content}
                assert parts == set(range(width // 64))


def copies(agent):
    return any(isinstance(event, Copy) for event in agent.events)


def is_wait(event, name):
    return isinstance(event, Wait) and event.barrier[0] == name


CLUSTER = ("product", 64, 2, 2)
"""A cluster in which a block has no row of the first group, and skips its steps."""
FAULTS = {
    "the copies of a block do not wait for its partner": (
        CLUSTER,
        lambda kernel: kernel._replace(arrivals=kernel.arrivals | {"free": Arrivals(1)}),
        "is overwritten while it is read|is read without its content",
    ),
    "a barrier counts one arrival too few": (
        CLUSTER,
        lambda kernel: kernel._replace(arrivals=kernel.arrivals | {"full": Arrivals(1)}),
        "more arrivals than a phase has",
    ),
    "a barrier counts one arrival too many": (
        CLUSTER,
        lambda kernel: kernel._replace(arrivals=kernel.arrivals | {"free": Arrivals(2, cluster=True)}),
        "deadlock",
    ),
    "a block does not wait for the last arrivals": (
        CLUSTER,
        lambda kernel: without(
            kernel, lambda event, agent, place: copies(agent) and place >= len(agent.events) - 2
        ),
        "which has ended|no agent has waited for",
    ),
    "the first wait for free buffers is left out, so the parities are wrong": (
        CLUSTER,
        lambda kernel: without(
            kernel, lambda event, agent, place: is_wait(event, "free") and place < 7 and copies(agent)
        ),
        "more arrivals than|is overwritten|without its content",
    ),
    "skipped steps are not released": (
        CLUSTER,
        lambda kernel: without(
            kernel, lambda event, agent, place: isinstance(event, Arrive) and agent.block == 1 and place == 2
        ),
        "deadlock",
    ),
    "buffers are released before the products have ended": (
        CLUSTER,
        lambda kernel: without(kernel, lambda event, agent, place: event == Finish(1)),
        "is overwritten while it is read",
    ),
    "copies are not announced for a matrix that a sweep does not use": (
        ("two sums", 64, 2, 1),
        lambda kernel: without(
            kernel, lambda event, agent, place: isinstance(event, Arrive) and copies(agent)
        ),
        "deadlock",
    ),
    "a warpgroup does not wait until the others have cleared rows": (
        (GRADIENT, 128, 2, 1),
        lambda kernel: without(kernel, lambda event, agent, place: is_wait(event, "cleared")),
        "without its content",
    ),
    "nothing synchronizes the clearing of rows": (
        (GRADIENT, 128, 2, 1),
        lambda kernel: without(
            kernel, lambda event, agent, place: getattr(event, "barrier", "")[:1] == ("cleared",)
        ),
        "is overwritten while it is read|without its content",
    ),
    "cleared rows are not made visible to products": (
        (GRADIENT, 128, 2, 1),
        lambda kernel: without(kernel, lambda event, agent, place: isinstance(event, Sync)),
        "not made visible",
    ),
    "a warp that skips steps is not waited for": (
        (*CLUSTER, 2),
        lambda kernel: without(kernel, lambda event, agent, place: isinstance(event, Sync)),
        "deadlock|without its content",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_search_finds_faults_in_rings(fault):
    kernel, put_in, message = FAULTS[fault]
    with pytest.raises(Fault, match=message):
        search(put_in(ring(*kernel)))


def test_warps_of_a_warpgroup_may_run_apart():
    assert search(ring(*CLUSTER, 2)) > search(ring(*CLUSTER))


@pytest.mark.parametrize(
    ("ranks", "stages", "blocks"), [(2, 2, 1), (2, 3, 1), long(2, 2, 2), long(3, 2, 1), long(3, 3, 1)]
)
def test_pulls_are_safe_in_every_order(ranks, stages, blocks):
    assert search(pull(ranks, stages, blocks)) > 20


@pytest.mark.parametrize(
    ("put_in", "message"),
    [
        (
            lambda kernel: without(kernel, lambda event, agent, place: isinstance(event, AwaitSignals)),
            "reads from rank .*, which has ended|signal to rank",
        ),
        (
            lambda kernel: without(kernel, lambda event, agent, place: event == Signal(0)),
            "deadlock",
        ),
        (
            lambda kernel: without(kernel, lambda event, agent, place: event == Finish(1)),
            "is overwritten while it is read",
        ),
        (
            lambda kernel: without(kernel, lambda event, agent, place: isinstance(event, Wait)),
            "without its content",
        ),
        (
            # Ranks signal before they read.
            lambda kernel: Kernel(
                [
                    agent._replace(
                        events=sorted(agent.events, key=lambda event: not isinstance(event, Signal))
                    )
                    for agent in kernel.agents
                ],
                kernel.arrivals,
            ),
            "reads from rank .*, which has ended",
        ),
    ],
)
def test_search_finds_faults_in_pulls(put_in, message):
    with pytest.raises(Fault, match=message):
        search(put_in(pull(2, 2)))
