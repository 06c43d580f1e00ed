"""The ping-pong schedule: micro-batches alternate between attention and experts, so that both sides have work.

Source: MegaScale-Infer (arXiv 2504.02263). A micro-batch goes through four stages in every layer: attention T_a,
transfer T_c, experts T_e, transfer back T_c. A stage serves one micro-batch at a time, micro-batches keep their order,
and a micro-batch starts a layer only after it has returned from the layer before. With T_f the longest stage, m
micro-batches, L layers and equal times everywhere, the step takes

    (T_a + T_e + 2 T_c) + T_f (m L - 1) + (L - 1) max(0, T_a + T_e + 2 T_c - m T_f).

The paper gives the first two terms, which are exact if m T_f covers a round trip. The third term makes the sum exact
for any m. Every chain of dependencies through the m L visits of the stages either spends T_f per visit on the longest
stage, or jumps over m visits in one round trip, at most L - 1 times. Its length is linear in the number of jumps, so
the longest chain has either none of them or all.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from experiments.deploy.costs import Number
from relibra_jax.contract.types import Array, check_shape


def step_time(
    attention: Number, experts: Number, exchange: Number, *, micro_batches: Number, layers: int
) -> Float[jax.Array, "..."]:
    """Return the seconds of one decoding step of all micro-batches, if times are equal in all layers and micro-batches.

    Args:
        attention: T_a, the seconds of attention for one micro-batch in one layer.
        experts: T_e, the seconds of the slowest group of expert devices for one micro-batch in one layer.
        exchange: T_c, the seconds of the transfer to the experts. The way back takes as long.
        micro_batches: the number of micro-batches, m.
        layers: the number of layers, L.

    >>> [float(step_time(2.0, 2.0, 1.0, micro_batches=m, layers=10)) for m in (1, 2, 3, 4)]
    [60.0, 62.0, 64.0, 84.0]
    """
    longest = jnp.maximum(jnp.maximum(attention, experts), exchange)
    trip = attention + experts + 2 * exchange
    waits = jnp.maximum(trip - micro_batches * longest, 0)
    return jnp.asarray(trip + longest * (micro_batches * layers - 1) + (layers - 1) * waits)


class Schedule(NamedTuple):
    """The times at which each micro-batch reaches attention and experts in each layer, in seconds from the start."""

    attention_start: Float[Array, "L m"]
    """The start of attention."""
    expert_start: Float[Array, "L m"]
    """The start of the experts."""
    returned: Float[Array, "L m"]
    """The time at which the results are back at attention."""

    @property
    def seconds(self) -> Float[Array, ""]:
        """The seconds of the whole step."""
        return self.returned[-1, -1]


@jax.jit
def simulate_ping_pong(
    attention: Float[Array, "L m"], experts: Float[Array, "L m"], exchange: Float[Array, "L m"]
) -> Schedule:
    """Simulate the schedule event by event, with individual times for every layer and micro-batch.

    Each of the four stages serves the micro-batches layer by layer, in their order within a layer. It starts the next
    one as soon as the stage is free and the micro-batch has arrived.

    Args:
        attention: the seconds of attention.
        experts: the seconds of the slowest group of expert devices.
        exchange: the seconds of the transfer to the experts. The way back takes as long.

    Returns:
        The start times of attention and experts, and the times of return.

    Raises:
        ValueError: if the shapes of the arguments differ.

    >>> times = jnp.ones((10, 3))
    >>> schedule = simulate_ping_pong(2 * times, 2 * times, times)
    >>> float(schedule.seconds), schedule.attention_start[:2].tolist()
    (64.0, [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]])
    >>> [round(each, 3) for each in idle_shares(2 * times, 2 * times, schedule)]
    [0.062, 0.062]
    """
    layers, micro_batches = attention.shape
    for name, times in (("experts", experts), ("exchange", exchange)):
        check_shape(name, times.shape, attention.shape)

    def visit(carry: tuple[jax.Array, jax.Array], event: tuple[jax.Array, jax.Array]):
        arrival, free = carry
        micro_batch, lengths = event
        start, end = [], arrival[micro_batch]
        for stage in range(4):
            start.append(jnp.maximum(end, free[stage]))
            end = start[-1] + lengths[stage]
        return (arrival.at[micro_batch].set(end), jnp.stack(start) + lengths), (start[0], start[2], end)

    order = jnp.tile(jnp.arange(micro_batches, dtype=jnp.int32), layers)
    lengths = jnp.stack([attention, exchange, experts, exchange], -1).reshape(-1, 4).astype(jnp.float32)
    initial = (jnp.zeros(micro_batches, jnp.float32), jnp.zeros(4, jnp.float32))
    _, starts = jax.lax.scan(visit, initial, (order, lengths))
    return Schedule(*(each.reshape(layers, micro_batches) for each in starts))


def idle_shares(
    attention: Float[Array, "L m"], experts: Float[Array, "L m"], schedule: Schedule
) -> tuple[float, float]:
    """Return the shares of the step in which the attention devices, and the busiest expert devices, wait.

    Args:
        attention: the seconds of attention.
        experts: the seconds of the slowest group of expert devices.
        schedule: the schedule of these times, from `simulate_ping_pong`.

    Returns:
        The share of attention, and the share of the experts.
    """
    attention_idle, expert_idle = (1 - float(busy.sum() / schedule.seconds) for busy in (attention, experts))
    return attention_idle, expert_idle
