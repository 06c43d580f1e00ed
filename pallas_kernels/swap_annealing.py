"""Simulated annealing over swaps of items between bins: one block a row, which keeps its row on chip for all steps.

A step takes one item, prices its swap with every item of one other bin, and makes the best of them, or none, after
noise that was drawn before. Steps follow one another, so a kernel has nothing to spread them over but the rows; inside
a step one warpgroup works, a lane for each item of the other bin. What a step reads and writes is in shared memory: a
launch and a pass through global memory for each step, as a loop of XLA's has it, would take many times as long.

What a row holds is a table with a column for each position: what the item there weighs in each micro-batch, then what
it would cost in each bin. A swap exchanges two columns. Every sum over micro-batches is taken in their order, one after
the other, and no product is summed, so that results are those of any other program that does the same.
"""

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES: Final = 128
"""The threads of a warpgroup."""
UNROLLED: Final = 8
"""Lines of the table that a turn of a loop works on. The table is padded with lines of zeros, which change no sum."""
SHARED_MEMORY_BYTES: Final = 224 * 1024
"""Shared memory for a row: what a block may use on compute capability 9.0, less 2 KB that reductions take and 1 KB."""


class Sizes(NamedTuple):
    """Everything that the kernel is compiled for, beside the number of rows and of steps."""

    bins: int
    """The number of bins."""
    size: int
    """The items of each bin; positions ``b * size`` to ``(b + 1) * size - 1`` are bin ``b``."""
    micro_batches: int
    """The number of micro-batches, a multiple of `UNROLLED`."""

    @property
    def lines(self) -> int:
        """Lines of the table: micro-batches, then bins, then zeros up to a multiple of `UNROLLED`."""
        return round_up(self.micro_batches + self.bins, UNROLLED)

    @property
    def window(self) -> int:
        """The items of a bin, rounded up to whole warpgroups."""
        return round_up(self.size, LANES)

    @property
    def width(self) -> int:
        """Columns of the table: a window from the first item of the last bin is inside."""
        return round_up((self.bins - 1) * self.size + self.window, LANES)

    @property
    def totals(self) -> int:
        """Columns of the bins' weights: micro-batches, rounded up to whole warpgroups."""
        return round_up(self.micro_batches, LANES)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a row takes."""
        return 4 * (self.lines * self.width + (self.bins + 1) * self.totals + self.width)


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple that is no less than a number."""
    return -(-number // multiple) * multiple


def swap_annealing(
    share: jax.Array, cost: jax.Array, total: jax.Array, i: jax.Array, q: jax.Array, noise: jax.Array
) -> jax.Array:
    """Anneal every row, on a Hopper GPU.

    Args:
        share: what each item weighs in each micro-batch, ``[items, micro-batches, rows]`` float32, not negative; items
            in order of position, of which each bin has as many.
        cost: what each item would cost in each bin, ``[bins, items, rows]`` float32; at least 2 bins.
        total: what each bin weighs in each micro-batch, ``[bins, micro-batches, rows]`` float32.
        i: the position of the one item of each step, ``[steps]`` int32.
        q: the other bin of each step, in which the item is not, ``[steps]`` int32.
        noise: what to take off the price of staying, and off that of each swap, ``[steps, 1 + items of a bin]``
            float32.

    Returns:
        For each position after the last step the position at which its item was before the first, ``[items, rows]``
        int32.

    Raises:
        ValueError: if a row does not fit into shared memory.
    """
    bins, items, rows = cost.shape
    micro_batches = share.shape[1]
    sizes = Sizes(bins, items // bins, round_up(micro_batches, UNROLLED))
    if sizes.shared_bytes > SHARED_MEMORY_BYTES:
        raise ValueError(
            f"{items} items x {micro_batches} micro-batches in {bins} bins take {sizes.shared_bytes} bytes of shared"
            f" memory, more than {SHARED_MEMORY_BYTES}"
        )
    spare = sizes.micro_batches - micro_batches
    table = jnp.concatenate(
        [jnp.pad(share.transpose(2, 1, 0), ((0, 0), (0, spare), (0, 0))), cost.transpose(2, 0, 1)], 1
    )
    table = jnp.pad(table, ((0, 0), (0, sizes.lines - table.shape[1]), (0, sizes.width - items)))
    total = jnp.pad(total.transpose(2, 0, 1), ((0, 0), (0, 0), (0, sizes.totals - micro_batches)))
    # A step reads the next one's item and bin ahead, the last one too.
    i, q = (jnp.pad(draw, (0, 1), mode="edge") for draw in (i, q))
    swaps = jnp.pad(noise[:, 1:], ((0, 0), (0, sizes.window - sizes.size)))
    kernel = plgpu.kernel(
        functools.partial(_anneal_row, sizes),
        out_type=jax.ShapeDtypeStruct((rows, sizes.width), jnp.int32),
        grid=(rows,),
        grid_names=("row",),
        scratch_types=[
            plgpu.SMEM((sizes.lines, sizes.width), jnp.float32),
            plgpu.SMEM((bins, sizes.totals), jnp.float32),
            plgpu.SMEM((sizes.totals,), jnp.float32),
            plgpu.SMEM((sizes.width,), jnp.int32),
        ],
        # Barriers are where a thread reads what another wrote, not around every store.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return kernel(table, total, i, q, noise[:, 0], swaps)[:, :items].T


def _anneal_row(
    sizes: Sizes,
    table: Any,
    total: Any,
    i: Any,
    q: Any,
    stay_noise: Any,
    swap_noise: Any,
    out: Any,
    own: Any,
    weights: Any,
    rest: Any,
    order: Any,
) -> None:
    """Anneal the row of this block; ``own``, ``weights``, ``rest`` and ``order`` are in shared memory."""
    row, steps = jax.lax.axis_index("row"), stay_noise.shape[0]
    _copy_lines(table.at[row], own)
    _copy_lines(total.at[row], weights)
    lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=_LAYOUT)
    for part in _parts(sizes.width):
        order[part] = lane + part.start
    plgpu.commit_smem()

    def step(number: jax.Array, draw: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (here, other), following = draw, (i[number + 1], q[number + 1])
        bin_ = jax.lax.div(here, jnp.int32(sizes.size))
        stay, noises = stay_noise[number], [swap_noise[number, part] for part in _parts(sizes.window)]
        if sizes.bins > 2:
            _fill_rest(sizes, weights, rest, bin_, other)
        choice = _choose(sizes, own, weights, rest, lane, (here, bin_, other), stay, noises)
        pl.when(choice < sizes.size)(
            lambda: _swap(sizes, own, weights, order, (here, bin_, other), other * sizes.size + choice)
        )
        return following

    jax.lax.fori_loop(0, steps, step, (i[0], q[0]))
    for part in _parts(sizes.width):
        out[row, part] = order[part]


_LAYOUT: Final = plgpu.Layout.WG_STRIDED((LANES,), 1)
"""One element a thread."""


def _parts(width: int) -> list[Any]:
    """The slices of one warpgroup each that make up a line."""
    return [pl.ds(first, LANES) for first in range(0, width, LANES)]


def _copy_lines(source: Any, target: Any) -> None:
    def copy(line: jax.Array, _: None) -> None:
        for part in _parts(target.shape[1]):
            target[line, part] = source[line, part]

    jax.lax.fori_loop(0, target.shape[0], copy, None)


def _fill_rest(sizes: Sizes, weights: Any, rest: Any, bin_: jax.Array, other: jax.Array) -> None:
    """Write what the fullest of the bins that a step leaves alone weighs in each micro-batch."""
    for part in _parts(sizes.totals):

        def fuller(index: jax.Array, most: jax.Array, part: Any = part) -> jax.Array:
            apart = jnp.broadcast_to((index != bin_) & (index != other), (LANES,))
            return jnp.maximum(most, jnp.where(apart, weights[index, part], 0.0))

        nothing = plgpu.layout_cast(jnp.zeros(LANES, jnp.float32), _LAYOUT)
        rest[part] = jax.lax.fori_loop(0, sizes.bins, fuller, nothing)
    plgpu.commit_smem()


def _choose(
    sizes: Sizes,
    own: Any,
    weights: Any,
    rest: Any,
    lane: jax.Array,
    step: tuple[jax.Array, jax.Array, jax.Array],
    stay: jax.Array,
    noises: list[jax.Array],
) -> jax.Array:
    """The item of the other bin to swap with, counted from its first; `Sizes.size` or more for none."""
    here, bin_, other = step
    first = other * sizes.size
    windows = [pl.ds(first + part.start, LANES) for part in _parts(sizes.window)]

    def add(line: jax.Array, sums: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        now, after = sums
        fullest = rest[line] if sizes.bins > 2 else jnp.float32(0)
        mine, a, b = own[line, here], weights[bin_, line], weights[other, line]
        gains = [own[line, window] - mine for window in windows]
        peaks = [jnp.maximum(jnp.maximum(a + gain, b - gain), fullest) for gain in gains]
        return now + jnp.maximum(jnp.maximum(a, b), fullest), [
            x + peak for x, peak in zip(after, peaks, strict=True)
        ]

    zeros = [plgpu.layout_cast(jnp.zeros(LANES, jnp.float32), _LAYOUT) for _ in windows]
    now, after = jax.lax.fori_loop(0, sizes.micro_batches, add, (jnp.float32(0), zeros), unroll=UNROLLED)
    costs_here, costs_there = sizes.micro_batches + bin_, sizes.micro_batches + other
    mine = own[costs_here, here] - own[costs_there, here]
    prices = []
    for first_lane, window, price, noise in zip(
        range(0, sizes.window, LANES), windows, after, noises, strict=True
    ):
        price = price + ((own[costs_here, window] - own[costs_there, window]) - mine) - noise
        prices.append(jnp.where(lane < sizes.size - first_lane, price, jnp.inf))
    best, which = prices[0], lane
    for number, price in enumerate(prices[1:], start=1):  # of equal ones the first
        which = jnp.where(price < best, lane + number * LANES, which)
        best = jnp.minimum(best, price)
    least = best.min()
    first_best = jnp.where(best == least, which, jnp.int32(sizes.window)).min()
    return jnp.where(now - stay <= least, jnp.int32(sizes.window), first_best)


def _swap(
    sizes: Sizes,
    own: Any,
    weights: Any,
    order: Any,
    step: tuple[jax.Array, jax.Array, jax.Array],
    there: jax.Array,
) -> None:
    """Exchange the items of two positions, and what their bins weigh."""
    here, bin_, other = step

    # All that is read is read before anything is written, line by line: threads write the same values.
    def exchange(turn: jax.Array, _: None, *, weigh: bool, first: int) -> None:
        lines = [first + turn * UNROLLED + line for line in range(UNROLLED)]
        columns = [(own[line, here], own[line, there]) for line in lines]
        sums = [(weights[bin_, line], weights[other, line]) for line in lines if weigh]
        plgpu.commit_smem()
        for line, (mine, theirs) in zip(lines, columns, strict=True):
            own[line, here] = theirs
            own[line, there] = mine
        if weigh:
            for line, (mine, theirs), (a, b) in zip(lines, columns, sums, strict=True):
                weights[bin_, line] = a + (theirs - mine)
                weights[other, line] = b - (theirs - mine)

    turns = sizes.micro_batches // UNROLLED
    jax.lax.fori_loop(0, turns, functools.partial(exchange, weigh=True, first=0), None)
    exchange_costs = functools.partial(exchange, weigh=False, first=sizes.micro_batches)
    jax.lax.fori_loop(0, sizes.lines // UNROLLED - turns, exchange_costs, None)
    mine, theirs = order[here], order[there]
    plgpu.commit_smem()
    order[here] = theirs
    order[there] = mine
    plgpu.commit_smem()
