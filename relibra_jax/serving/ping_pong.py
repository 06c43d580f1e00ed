"""The ping-pong schedule: micro-batches that go to and fro between attention and experts, so that both have work.

Source: MegaScale-Infer (arXiv 2504.02263). A micro-batch goes through four stages in every layer: attention T_a,
transfer T_c, experts T_e, transfer back T_c. A stage serves one micro-batch at a time, micro-batches keep their order,
and one cannot start a layer before it has come back from the one before. With T_f the longest stage, m micro-batches, L
layers and equal times everywhere, the step takes

    (T_a + T_e + 2 T_c) + T_f (m L - 1) + (L - 1) max(0, T_a + T_e + 2 T_c - m T_f).

The paper gives the first two terms, which hold where m T_f covers a round trip. The third makes the sum exact for any
m: every chain of dependences through the m L visits of the stages spends T_f a visit on the longest stage, or jumps m
visits in a round trip, and at most L - 1 times; that is linear in the jumps, so either none of them or all are longest.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from relibra_jax.serving.phase_times import Number
from relibra_jax.types import Array, check_shape


def step_time(
    attention: Number, experts: Number, exchange: Number, *, micro_batches: Number, layers: int
) -> Float[jax.Array, "..."]:
    """Seconds of one decoding step of all micro-batches, each of them a token further, where times do not vary.

    Args:
        attention: T_a, seconds of attention for one micro-batch in one layer.
        experts: T_e, of the slowest group of expert devices.
        exchange: T_c, of the way to the experts, which is as long as the way back.
        micro_batches: m.
        layers: L.

    >>> [float(step_time(2.0, 2.0, 1.0, micro_batches=m, layers=10)) for m in (1, 2, 3, 4)]
    [60.0, 62.0, 64.0, 84.0]
    """
    longest = jnp.maximum(jnp.maximum(attention, experts), exchange)
    trip = attention + experts + 2 * exchange
    waits = jnp.maximum(trip - micro_batches * longest, 0)
    return jnp.asarray(trip + longest * (micro_batches * layers - 1) + (layers - 1) * waits)


class Schedule(NamedTuple):
    """When each micro-batch is at either side in each layer; seconds from the start of the step."""

    attention_start: Float[Array, "L m"]
    expert_start: Float[Array, "L m"]
    returned: Float[Array, "L m"]
    """When its token copies are back at attention."""

    @property
    def seconds(self) -> Float[Array, ""]:
        """Seconds of the step."""
        return self.returned[-1, -1]


@jax.jit
def simulate_ping_pong(
    attention: Float[Array, "L m"], experts: Float[Array, "L m"], exchange: Float[Array, "L m"]
) -> Schedule:
    """Run the schedule event by event, with times of every layer and micro-batch.

    Each of the four stages takes up the next micro-batch, in the order of layers and inside them of micro-batches, as
    soon as it is free and the micro-batch is there.

    Args:
        attention: seconds of attention.
        experts: seconds of the experts, of the slowest group of expert devices.
        exchange: seconds of the way to the experts, which is as long as the way back.

    Raises:
        ValueError: if shapes differ.

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
        there, free = carry
        micro_batch, lengths = event
        start, end = [], there[micro_batch]
        for stage in range(4):
            start.append(jnp.maximum(end, free[stage]))
            end = start[-1] + lengths[stage]
        return (there.at[micro_batch].set(end), jnp.stack(start) + lengths), (start[0], start[2], end)

    order = jnp.tile(jnp.arange(micro_batches, dtype=jnp.int32), layers)
    lengths = jnp.stack([attention, exchange, experts, exchange], -1).reshape(-1, 4).astype(jnp.float32)
    nothing = (jnp.zeros(micro_batches, jnp.float32), jnp.zeros(4, jnp.float32))
    _, starts = jax.lax.scan(visit, nothing, (order, lengths))
    return Schedule(*(each.reshape(layers, micro_batches) for each in starts))


def idle_shares(
    attention: Float[Array, "L m"], experts: Float[Array, "L m"], schedule: Schedule
) -> tuple[float, float]:
    """The shares of the step in which attention and the busiest expert devices wait.

    Args:
        attention: seconds of attention.
        experts: seconds of the experts, of the slowest group of expert devices.
        schedule: what `simulate_ping_pong` made of them.
    """
    attends, computes = (1 - float(busy.sum() / schedule.seconds) for busy in (attention, experts))
    return attends, computes
