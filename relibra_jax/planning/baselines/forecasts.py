"""How loads are expected: by the true ones, which routing replay gives, or by what systems without replay can know.

Those place and copy experts by loads of the past, or by what a micro-batch has shown so far. A forecast makes the same
planner run on either, so that the worth of foresight can be measured; `relibra_jax.planning.metrics.forecast_error`
says how far each is from the truth.

Expected loads are in proportion: only the shares of experts within a layer of a micro-batch mean anything. They are not
scaled to the true sums, as no planner's choice depends on that, and whole numbers stay exact in float32.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Num

from relibra_jax.plan import expert_totals
from relibra_jax.plan_check import check_load
from relibra_jax.planning.extra_args import taken_by, takes
from relibra_jax.types import EMPTY, Array, Plan, Planner, Topology, Transitions

SCOPES: Final = ("batch", "micro_batch")

type Expected = tuple[Float[jax.Array, "L E"], Float[jax.Array, "M L E"], Any]


class Forecast(NamedTuple):
    """A pair of pure functions, as planners are: what was seen, and what is expected from it.

    - ``init(topology, num_layers, *, key=None) -> state``: nothing seen yet.
    - ``update(load[M L E], state, *, transitions=None) -> (for_homes[L E], expected[M L E], state)``: loads to place a
      batch's homes by, known before it; loads to copy experts of each micro-batch by; and the state after the batch.
      Zeros where nothing is known. A forecast that has no use for `Transitions` does not name them.
    """

    init: Callable[..., Any]
    """Makes the first state."""
    update: Callable[..., Expected]
    """Expects the loads of a batch."""


class LoadHistory(NamedTuple):
    """What `history` has seen."""

    batch: Float[jax.Array, "L E"]
    """Load of the last batch, summed over its micro-batches; zeros before the first."""
    micro_batch: Float[jax.Array, "L E"]
    """Load of its last micro-batch."""


class ChainHistory(NamedTuple):
    """What the forecasts by transitions have seen."""

    batch: Float[jax.Array, "L E"]
    """Load of the last batch; zeros before the first."""
    counts: Float[jax.Array, "L E E"]
    """The transitions of the last batch that had them; zeros before the first."""


def _nothing(topology: Topology, num_layers: int, *, key: jax.Array | None = None) -> Float[jax.Array, "L E"]:
    del key
    return jnp.zeros((num_layers, topology.num_experts), jnp.float32)


def _true() -> Forecast:
    def init(topology: Topology, num_layers: int, *, key=None) -> tuple[()]:
        del topology, num_layers, key
        return ()

    def update(load: Num[jax.Array, "M L E"], state) -> Expected:
        load = load.astype(jnp.float32)
        return load.sum(0), load, state

    return Forecast(init, update)


def _history() -> Forecast:
    def init(topology: Topology, num_layers: int, *, key=None) -> LoadHistory:
        nothing = _nothing(topology, num_layers, key=key)
        return LoadHistory(nothing, nothing)

    def update(load: Num[jax.Array, "M L E"], state: LoadHistory) -> Expected:
        load = load.astype(jnp.float32)
        earlier = jnp.concatenate([state.micro_batch[None], load[:-1]])
        return state.batch, earlier, LoadHistory(load.sum(0), load[-1])

    return Forecast(init, update)


def _mean() -> Forecast:
    def update(load: Num[jax.Array, "M L E"], seen: Float[jax.Array, "L E"]) -> Expected:
        until = seen[None] + jnp.cumsum(load.astype(jnp.float32), axis=0)
        return seen, jnp.concatenate([seen[None], until[:-1]]), until[-1]

    return Forecast(_nothing, update)


def average(*, decay: float = 0.5) -> Forecast:
    """Expect the exponential average of all micro-batches seen so far.

    Args:
        decay: the part of the average that stays when a micro-batch is added; 0 is the micro-batch before. On the
            recorded trace the best is near 1, which is the mean, if samples are shuffled (14%), and 0.3 if they are as
            recorded (21% to 27%); with 0.5 the error is within 9% of the best in batches of 44, 88 and 176 samples.

    Returns:
        A Forecast whose state is the average, ``[L, E]``.
    """

    def update(load: Num[jax.Array, "M L E"], seen: Float[jax.Array, "L E"]) -> Expected:
        def step(before, load):
            return decay * before + (1 - decay) * load, before

        after, before = jax.lax.scan(step, seen, load.astype(jnp.float32))
        return seen, before, after

    return Forecast(_nothing, update)


def _by_transitions(
    kind: str, source: Callable[[Num[jax.Array, "M L E"]], Num[jax.Array, "M L E"]]
) -> Forecast:
    """Expect what follows from the true loads of ``source``, by the counts ``kind`` of the batch before.

    Homes are placed by the batch before, as nothing of a batch is routed when they are.
    """

    def init(topology: Topology, num_layers: int, *, key=None) -> ChainHistory:
        nothing = _nothing(topology, num_layers, key=key)
        return ChainHistory(nothing, jnp.zeros((*nothing.shape, topology.num_experts), jnp.float32))

    def update(
        load: Num[jax.Array, "M L E"], state: ChainHistory, *, transitions: Transitions | None = None
    ) -> Expected:
        load = load.astype(jnp.float32)
        # Under vmap a loop, as in LPLB: a product of more matrices may be summed in another order.
        expected = jax.custom_batching.sequential_vmap(_follow)(source(load), state.counts, state.batch)
        counts = state.counts if transitions is None else getattr(transitions, kind).astype(jnp.float32)
        return state.batch, expected, ChainHistory(load.sum(0), counts)

    return Forecast(init, update)


@jax.jit
def _follow(
    load: Float[jax.Array, "M L E"], counts: Float[jax.Array, "L E E"], batch: Float[jax.Array, "L E"]
) -> Float[jax.Array, "M L E"]:
    """The load one transition later; what leaves experts that nothing was counted for spreads as the batch before."""
    leaving = counts.sum(-1)
    chance = counts / jnp.maximum(leaving, 1)[..., None]
    share = batch / jnp.maximum(batch.sum(-1, keepdims=True), 1)
    known = jnp.einsum("mle,lef->mlf", load, chance, precision="highest")
    return known + jnp.where(leaving == 0, load, 0).sum(-1, keepdims=True) * share[None]


def _layer_below(load: Num[jax.Array, "M L E"]) -> Num[jax.Array, "M L E"]:
    """The loads one layer below; the first layer, which nothing leads to, has its own for their sum."""
    return jnp.concatenate([load[:, :1], load[:, :-1]], axis=1)


FORECASTS: dict[str, Forecast] = {
    "true": _true(),
    "history": _history(),
    "mean": _mean(),
    "average": average(),
    "next_token": _by_transitions("along_tokens", lambda load: load),
    "across_layers": _by_transitions("across_layers", _layer_below),
}
"""How loads may be expected, by name.

- ``true``: the loads themselves, as routing replay gives them.
- ``history``: homes by the batch before, replicas by the micro-batch before.
- ``mean``: the mean of all micro-batches seen so far, those of earlier batches too.
- ``average``: their exponential average.
- ``next_token``: what follows, one token later, from the loads of the same micro-batch and layer, by a table of the
  experts of neighbouring tokens counted on the batch before. What it expects from is nearly all of the routing that it
  expects: it knows more than any system without replay does.
- ``across_layers``: what follows, one layer later, from the true loads of the layer below in the same micro-batch, by a
  table counted on the batch before (PopFetcher); the first layer from the mean of the batch before. As much as a
  system that decides between two layers knows.

The last two take what leaves experts that nothing was counted for to spread as the mean of the batch before: all loads,
where a planner is told no transitions.
"""


def expect_loads(
    forecast: Forecast,
    load: Num[jax.Array, "M L E"],
    state: Any,
    *,
    scope: str,
    transitions: Transitions | None,
) -> tuple[Float[jax.Array, "L E"], Float[jax.Array, "#M L E"], Any]:
    """What a planner expects: loads for homes, loads for replicas, and the forecast's state after the batch.

    Args:
        forecast: of `FORECASTS`.
        load: true loads of the experts.
        state: the forecast's state before the batch.
        scope: ``micro_batch``, or ``batch`` for replicas that are chosen once, by the loads for homes.
        transitions: counts of the batch, or None.

    Returns:
        Both loads, float32, and the state.
    """
    known = taken_by(forecast.update, {"transitions": transitions})
    for_homes, expected, state = forecast.update(load, state, **known)
    return for_homes, for_homes[None] if scope == "batch" else expected, state


class PlacedState(NamedTuple):
    """State of the planners that place and copy by what a forecast expects."""

    seen: Any
    """The state of the forecast."""
    home: Int[jax.Array, "L E"]
    """Flat home slot of each expert in the batch before; EMPTY in a layer of which nothing was known."""


def plan_expected(
    pack: Callable[..., Array], fill: Callable[..., Plan], *, loads: str, scope: str, keep_homes: bool
) -> Planner:
    """A planner that places and copies by what a forecast expects.

    Args:
        pack: ``(for_homes[L E], topology) -> home[L E]``.
        fill: ``(load[M L E], expected[#M L E], home[L E], topology) -> Plan``; ``load`` is what quotas sum to.
        loads: a name of `FORECASTS`.
        scope: how often replicas are chosen: once a ``batch``, or anew for every ``micro_batch``.
        keep_homes: whether homes stay where the first batch of which something is expected has put them; otherwise
            they are packed anew in every batch.

    Returns:
        A Planner whose state is a PlacedState. It names ``transitions`` if the forecast does.

    Raises:
        ValueError: if ``loads`` or ``scope`` is unknown.
    """
    for name, value, options in (("loads", loads, FORECASTS), ("scope", scope, SCOPES)):
        if value not in options:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(options)}")
    forecast = FORECASTS[loads]

    def init(topology: Topology, num_layers: int, *, key: jax.Array | None = None) -> PlacedState:
        nowhere = jnp.full((num_layers, topology.num_experts), EMPTY, jnp.int32)
        return PlacedState(forecast.init(topology, num_layers, key=key), nowhere)

    def update_told(load, state, topology: Topology, *, transitions: Transitions | None = None):
        check_load(load, topology)
        load = expert_totals(load)
        for_homes, expected, seen = expect_loads(
            forecast, load, state.seen, scope=scope, transitions=transitions
        )
        home = pack(for_homes, topology)
        if keep_homes:
            home = jnp.where(state.home == EMPTY, home, state.home)
        unknown = (for_homes.sum(-1) == 0) & (state.home[:, 0] == EMPTY)
        after = jnp.where(unknown[:, None], EMPTY, home)
        return fill(load, expected, home, topology), PlacedState(seen, after)

    def update(load, state, topology: Topology):
        return update_told(load, state, topology)

    return Planner(init, update_told if takes(forecast.update, "transitions") else update)
