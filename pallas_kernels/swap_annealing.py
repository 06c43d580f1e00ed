"""A Hopper kernel for simulated annealing over swaps of items between bins.

A row is one independent annealing problem. Each row is computed by one block, which keeps the row in shared memory for
all steps. A step takes one item, computes the price of swapping it with every item of one other bin, and makes the
cheapest swap or none. The noise that is subtracted from the prices is drawn before the kernel starts. The steps of a
row are sequential, so the kernel is parallel only over rows and, within a step, over the items of the other bin: one
warpgroup works on a row, with one lane for each item. A loop in XLA would need launches and passes through global
memory in every step, which would take many times as long.

The data of a row is a table with one column for each position. A column holds the item's weight in each micro-batch,
followed by its cost in each bin. A swap exchanges two columns. Sums over micro-batches are taken sequentially in their
order and contain no products, so the results equal those of any other program that adds in the same order.
"""

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES: Final = 128
"""The number of threads of a warpgroup."""
UNROLLED: Final = 8
"""The number of table lines that one loop iteration processes. Padding the table with lines of zeros changes no sum."""
SHARED_MEMORY_BYTES: Final = 224 * 1024
"""The shared memory available for a row: the 227 KB that a block may use on compute capability 9.0, less 2 KB for
reductions and a further 1 KB."""


class Sizes(NamedTuple):
    """The sizes that the kernel is compiled for, except the numbers of rows and steps."""

    bins: int
    """The number of bins."""
    size: int
    """The number of items of each bin. Positions ``b * size`` to ``(b + 1) * size - 1`` belong to bin ``b``."""
    micro_batches: int
    """The number of micro-batches, a multiple of `UNROLLED`."""

    @property
    def lines(self) -> int:
        """The number of lines of the table: micro-batches, then bins, then zeros up to a multiple of `UNROLLED`."""
        return round_up(self.micro_batches + self.bins, UNROLLED)

    @property
    def window(self) -> int:
        """The number of items of a bin, rounded up to whole warpgroups."""
        return round_up(self.size, LANES)

    @property
    def width(self) -> int:
        """The number of columns of the table, large enough for a window that starts at the last bin's first item."""
        return round_up((self.bins - 1) * self.size + self.window, LANES)

    @property
    def totals(self) -> int:
        """The number of columns of the table of bin weights: micro-batches, rounded up to whole warpgroups."""
        return round_up(self.micro_batches, LANES)

    @property
    def shared_bytes(self) -> int:
        """The number of bytes of shared memory that a row takes."""
        return 4 * (self.lines * self.width + (self.bins + 1) * self.totals + self.width)


def round_up(number: int, multiple: int) -> int:
    """Round a number up to the next multiple."""
    return -(-number // multiple) * multiple


def swap_annealing(
    share: jax.Array, cost: jax.Array, total: jax.Array, i: jax.Array, q: jax.Array, noise: jax.Array
) -> jax.Array:
    """Run simulated annealing on every row, on a Hopper GPU.

    Args:
        share: the weight of each item in each micro-batch, non-negative float32 ``[items, micro-batches, rows]``. The
            items are in order of position, and all bins have the same number of items.
        cost: the cost of each item in each bin, float32 ``[bins, items, rows]``, for at least 2 bins.
        total: the weight of each bin in each micro-batch, float32 ``[bins, micro-batches, rows]``.
        i: the position of the item that each step tries to swap, int32 ``[steps]``.
        q: the bin that each step tries to swap the item into, int32 ``[steps]``. The item must not be in it.
        noise: the amounts subtracted from the price of no swap (first column) and from the price of each swap, float32
            ``[steps, 1 + items of a bin]``.

    Returns:
        The initial position of the item that is at each position after the last step, int32 ``[items, rows]``.

    Raises:
        ValueError: if a row does not fit into shared memory.
    """
    bins, items, rows = cost.shape
    micro_batches = share.shape[1]
    sizes = Sizes(bins, items // bins, round_up(micro_batches, UNROLLED))
    if sizes.shared_bytes > SHARED_MEMORY_BYTES:
        raise ValueError(
            f"{items} items x {micro_batches} micro-batches in {bins} bins take {sizes.shared_bytes} bytes of shared"
            f" memory, but only {SHARED_MEMORY_BYTES} are available"
        )
    spare = sizes.micro_batches - micro_batches
    table = jnp.concatenate(
        [jnp.pad(share.transpose(2, 1, 0), ((0, 0), (0, spare), (0, 0))), cost.transpose(2, 0, 1)], 1
    )
    table = jnp.pad(table, ((0, 0), (0, sizes.lines - table.shape[1]), (0, sizes.width - items)))
    total = jnp.pad(total.transpose(2, 0, 1), ((0, 0), (0, 0), (0, sizes.totals - micro_batches)))
    # Every step, also the last one, prefetches the item and bin of the next step.
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
        # The code places barriers itself, where a thread reads what another wrote, instead of around every store.
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
    smem_table: Any,
    weights: Any,
    rest_weights: Any,
    order: Any,
) -> None:
    """Anneal the row of this block; the last four arguments are in shared memory."""
    row, steps = jax.lax.axis_index("row"), stay_noise.shape[0]
    _copy_lines(table.at[row], smem_table)
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
            _fill_rest(sizes, weights, rest_weights, bin_, other)
        choice = _choose(sizes, smem_table, weights, rest_weights, lane, (here, bin_, other), stay, noises)
        pl.when(choice < sizes.size)(
            lambda: _swap(sizes, smem_table, weights, order, (here, bin_, other), other * sizes.size + choice)
        )
        return following

    jax.lax.fori_loop(0, steps, step, (i[0], q[0]))
    for part in _parts(sizes.width):
        out[row, part] = order[part]


_LAYOUT: Final = plgpu.Layout.WG_STRIDED((LANES,), 1)
"""A layout with one element per thread."""


def _parts(width: int) -> list[Any]:
    """Return the slices that cut a line into pieces of one element per thread."""
    return [pl.ds(first, LANES) for first in range(0, width, LANES)]


def _copy_lines(source: Any, target: Any) -> None:
    def copy(line: jax.Array, _: None) -> None:
        for part in _parts(target.shape[1]):
            target[line, part] = source[line, part]

    jax.lax.fori_loop(0, target.shape[0], copy, None)


def _fill_rest(sizes: Sizes, weights: Any, rest_weights: Any, bin_: jax.Array, other: jax.Array) -> None:
    """Write the weight of the heaviest of all bins that the step does not change, for each micro-batch."""
    for part in _parts(sizes.totals):

        def update_maximum(index: jax.Array, maximum: jax.Array, part: Any = part) -> jax.Array:
            unchanged = jnp.broadcast_to((index != bin_) & (index != other), (LANES,))
            return jnp.maximum(maximum, jnp.where(unchanged, weights[index, part], 0.0))

        zeros = plgpu.layout_cast(jnp.zeros(LANES, jnp.float32), _LAYOUT)
        rest_weights[part] = jax.lax.fori_loop(0, sizes.bins, update_maximum, zeros)
    plgpu.commit_smem()


def _choose(
    sizes: Sizes,
    smem_table: Any,
    weights: Any,
    rest_weights: Any,
    lane: jax.Array,
    step: tuple[jax.Array, jax.Array, jax.Array],
    stay: jax.Array,
    noises: list[jax.Array],
) -> jax.Array:
    """Return the index in the other bin of the item to swap with; `Sizes.size` or more means no swap."""
    here, bin_, other = step
    first = other * sizes.size
    windows = [pl.ds(first + part.start, LANES) for part in _parts(sizes.window)]

    def add(line: jax.Array, sums: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        now, after = sums
        fullest = rest_weights[line] if sizes.bins > 2 else jnp.float32(0)
        here_value, a, b = smem_table[line, here], weights[bin_, line], weights[other, line]
        gains = [smem_table[line, window] - here_value for window in windows]
        peaks = [jnp.maximum(jnp.maximum(a + gain, b - gain), fullest) for gain in gains]
        return now + jnp.maximum(jnp.maximum(a, b), fullest), [
            x + peak for x, peak in zip(after, peaks, strict=True)
        ]

    zeros = [plgpu.layout_cast(jnp.zeros(LANES, jnp.float32), _LAYOUT) for _ in windows]
    now, after = jax.lax.fori_loop(0, sizes.micro_batches, add, (jnp.float32(0), zeros), unroll=UNROLLED)
    costs_here, costs_there = sizes.micro_batches + bin_, sizes.micro_batches + other
    here_value = smem_table[costs_here, here] - smem_table[costs_there, here]
    prices = []
    for first_lane, window, price, noise in zip(
        range(0, sizes.window, LANES), windows, after, noises, strict=True
    ):
        price = (
            price + ((smem_table[costs_here, window] - smem_table[costs_there, window]) - here_value) - noise
        )
        prices.append(jnp.where(lane < sizes.size - first_lane, price, jnp.inf))
    best, which = prices[0], lane
    for number, price in enumerate(prices[1:], start=1):  # the first of equal prices wins
        which = jnp.where(price < best, lane + number * LANES, which)
        best = jnp.minimum(best, price)
    least = best.min()
    first_best = jnp.where(best == least, which, jnp.int32(sizes.window)).min()
    return jnp.where(now - stay <= least, jnp.int32(sizes.window), first_best)


def _swap(
    sizes: Sizes,
    smem_table: Any,
    weights: Any,
    order: Any,
    step: tuple[jax.Array, jax.Array, jax.Array],
    there: jax.Array,
) -> None:
    """Swap the items at two positions, and update the weights of their bins."""
    here, bin_, other = step

    # Each group of lines is read completely before it is written, since all threads write the same values.
    def exchange(iteration: jax.Array, _: None, *, weigh: bool, first: int) -> None:
        lines = [first + iteration * UNROLLED + line for line in range(UNROLLED)]
        columns = [(smem_table[line, here], smem_table[line, there]) for line in lines]
        sums = [(weights[bin_, line], weights[other, line]) for line in lines if weigh]
        plgpu.commit_smem()
        for line, (here_value, there_value) in zip(lines, columns, strict=True):
            smem_table[line, here] = there_value
            smem_table[line, there] = here_value
        if weigh:
            for line, (here_value, there_value), (a, b) in zip(lines, columns, sums, strict=True):
                weights[bin_, line] = a + (there_value - here_value)
                weights[other, line] = b - (there_value - here_value)

    iterations = sizes.micro_batches // UNROLLED
    jax.lax.fori_loop(0, iterations, functools.partial(exchange, weigh=True, first=0), None)
    exchange_costs = functools.partial(exchange, weigh=False, first=sizes.micro_batches)
    jax.lax.fori_loop(0, sizes.lines // UNROLLED - iterations, exchange_costs, None)
    here_value, there_value = order[here], order[there]
    plgpu.commit_smem()
    order[here] = there_value
    order[there] = here_value
    plgpu.commit_smem()
