"""Load forecasts: the true loads, which routing replay gives, or predictions that systems without replay can make.

Systems without replay place and copy experts by past loads, or by what they have seen of a micro-batch so far. The same
planner can run on any forecast, which measures the value of foresight; `relibra_jax.planning.metrics.forecast_error`
measures the error of a forecast.

Only the proportions of expected loads between the experts of a layer and micro-batch have a meaning. Expected loads are
not scaled to the true sums: no planner's choice depends on that, and integers stay exact in float32.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Num, PRNGKeyArray

from relibra_jax.contract.planner import Init, Planner, PlanRequest, Transitions
from relibra_jax.contract.types import EMPTY, Array, Plan, Topology
from relibra_jax.planning.compiled_update import compiled_update

SCOPES: Final = ("batch", "micro_batch")
"""How often a planner may choose replicas."""

POPULARITY_WINDOW: Final = 10
"""The number of iterations of PopFetcher's sliding window, which its authors found best (table 4)."""

type Expected = tuple[Float[jax.Array, "L E"], Float[jax.Array, "M L E"], Any]
"""``(for_homes, expected, state)``: loads for homes, loads for replicas, and the state of the forecast."""


class Forecast(NamedTuple):
    """A forecast of loads: a pair of pure functions, like a planner.

    - ``init(topology, num_layers, *, key=None) -> state``: the state before the first batch.
    - ``update(load[M L E], state, transitions) -> (for_homes[L E], expected[M L E], state)``: the loads by which to
      place the homes of a batch, forecast before it starts; the loads by which to copy experts in each micro-batch; and
      the state after the batch. Loads are zero if there is no data yet.
    """

    init: Init
    """Makes the first state."""
    update: Callable[[Num[jax.Array, "M L E"], Any, Transitions | None], Expected]
    """Forecasts the loads of a batch and updates the state."""
    uses_transitions: bool = False
    """Whether ``update`` uses the transition counts of the batch."""


class LoadHistory(NamedTuple):
    """The state of the forecast ``history``."""

    batch: Float[jax.Array, "L E"]
    """Load of the last batch, summed over its micro-batches; zeros before the first."""
    micro_batch: Float[jax.Array, "L E"]
    """Load of its last micro-batch."""


class ChainHistory(NamedTuple):
    """The state of the forecasts by transitions, ``next_token`` and ``across_layers``."""

    batch: Float[jax.Array, "L E"]
    """Load of the last batch; zeros before the first."""
    counts: Float[jax.Array, "L E E"]
    """The transition counts of the last batch for which they were given; zeros before the first."""
    recent: Float[jax.Array, "earlier L E"]
    """The loads of its last micro-batches, those of earlier batches before them; zeros before the first."""


def _zero_loads(
    topology: Topology, num_layers: int, *, key: jax.Array | None = None
) -> Float[jax.Array, "L E"]:
    del key
    return jnp.zeros((num_layers, topology.num_experts), jnp.float32)


def _true() -> Forecast:
    def init(topology: Topology, num_layers: int, *, key=None) -> tuple[()]:
        del topology, num_layers, key
        return ()

    def update(load: Num[jax.Array, "M L E"], state, transitions: Transitions | None) -> Expected:
        del transitions
        load = load.astype(jnp.float32)
        return load.sum(0), load, state

    return Forecast(init, update)


def _history() -> Forecast:
    def init(topology: Topology, num_layers: int, *, key=None) -> LoadHistory:
        zeros = _zero_loads(topology, num_layers, key=key)
        return LoadHistory(zeros, zeros)

    def update(
        load: Num[jax.Array, "M L E"], state: LoadHistory, transitions: Transitions | None
    ) -> Expected:
        del transitions
        load = load.astype(jnp.float32)
        earlier = jnp.concatenate([state.micro_batch[None], load[:-1]])
        return state.batch, earlier, LoadHistory(load.sum(0), load[-1])

    return Forecast(init, update)


def _mean() -> Forecast:
    def update(
        load: Num[jax.Array, "M L E"], total: Float[jax.Array, "L E"], transitions: Transitions | None
    ) -> Expected:
        del transitions
        totals = total[None] + jnp.cumsum(load.astype(jnp.float32), axis=0)
        return total, jnp.concatenate([total[None], totals[:-1]]), totals[-1]

    return Forecast(_zero_loads, update)


def average(*, decay: float = 0.5) -> Forecast:
    """Make a forecast that expects the exponential average of all previous micro-batches.

    Args:
        decay: the weight of the previous average when a micro-batch is added; with 0 the forecast is the previous
            micro-batch. On the recorded trace the smallest error is near 1, the mean, if samples are shuffled (error
            14%), and at 0.3 if they are in recorded order (21% to 27%). With 0.5 the error is within 9% of the smallest
            in batches of 44, 88 and 176 samples.

    Returns:
        A Forecast whose state is the average, ``[L, E]``.
    """

    def update(
        load: Num[jax.Array, "M L E"], mean: Float[jax.Array, "L E"], transitions: Transitions | None
    ) -> Expected:
        del transitions

        def step(previous, load):
            return decay * previous + (1 - decay) * load, previous

        last, previous = jax.lax.scan(step, mean, load.astype(jnp.float32))
        return mean, previous, last

    return Forecast(_zero_loads, update)


def _by_transitions(
    kind: str, source: Callable[[Num[jax.Array, "M L E"]], Num[jax.Array, "M L E"]], *, window: int = 1
) -> Forecast:
    """Make a forecast that applies the previous batch's transitions to true loads.

    Homes are placed by the load of the previous batch, because no token of the batch is routed yet at that time.

    Args:
        kind: the field of `Transitions` to use.
        source: the function that gives, from the true loads, the loads from which the transitions lead.
        window: the number of micro-batches, the present one included, over whose sum they lead.
    """

    def init(topology: Topology, num_layers: int, *, key=None) -> ChainHistory:
        zeros = _zero_loads(topology, num_layers, key=key)
        counts = jnp.zeros((*zeros.shape, topology.num_experts), jnp.float32)
        return ChainHistory(zeros, counts, jnp.zeros((window - 1, *zeros.shape), jnp.float32))

    def update(
        load: Num[jax.Array, "M L E"], state: ChainHistory, transitions: Transitions | None
    ) -> Expected:
        load = load.astype(jnp.float32)
        known = jnp.concatenate([state.recent, load])
        summed = jnp.asarray(sum(known[first : first + len(load)] for first in range(window)))
        # Under vmap this is a loop, as in LPLB: a batched matrix product may sum in a different order.
        expected = jax.custom_batching.sequential_vmap(_follow)(source(summed), state.counts, state.batch)
        counts = state.counts if transitions is None else getattr(transitions, kind).astype(jnp.float32)
        return state.batch, expected, ChainHistory(load.sum(0), counts, known[len(load) :])

    return Forecast(init, update, uses_transitions=True)


@jax.jit
def _follow(
    load: Float[jax.Array, "M L E"], counts: Float[jax.Array, "L E E"], batch: Float[jax.Array, "L E"]
) -> Float[jax.Array, "M L E"]:
    """Apply transitions to loads; the load of experts without counts is spread like the previous batch's load."""
    departures = counts.sum(-1)
    chance = counts / jnp.maximum(departures, 1)[..., None]
    share = batch / jnp.maximum(batch.sum(-1, keepdims=True), 1)
    predicted = jnp.einsum("mle,lef->mlf", load, chance, precision="highest")
    return predicted + jnp.where(departures == 0, load, 0).sum(-1, keepdims=True) * share[None]


def _layer_below(load: Num[jax.Array, "M L E"]) -> Num[jax.Array, "M L E"]:
    """Return the loads one layer below; the first layer keeps its own loads, of which only the sum is used."""
    return jnp.concatenate([load[:, :1], load[:, :-1]], axis=1)


FORECASTS: dict[str, Forecast] = {
    "true": _true(),
    "history": _history(),
    "mean": _mean(),
    "average": average(),
    "next_token": _by_transitions("along_tokens", lambda load: load),
    "across_layers": _by_transitions("across_layers", _layer_below),
    "popularity": _by_transitions("across_layers", _layer_below, window=POPULARITY_WINDOW),
}
"""The forecasts of loads, by name.

- ``true``: the true loads, as routing replay gives them.
- ``history``: the previous batch for homes, the previous micro-batch for replicas.
- ``mean``: the mean of all previous micro-batches, including earlier batches.
- ``average``: the exponential average of all previous micro-batches.
- ``next_token``: the true loads of the same micro-batch and layer, advanced by one token with the transitions between
  neighbouring tokens of the previous batch. Its input is nearly all of the routing that it forecasts, so it has more
  information than any system without replay.
- ``across_layers``: the true loads of the layer below in the same micro-batch, advanced by one layer with the
  transitions of the previous batch. The first layer is forecast from the mean of the previous batch. A system that
  decides between two layers has this information.
- ``popularity``: the same from the sum of the loads of the layer below over 10 micro-batches, the last of which is the
  present one (PopFetcher).

In the last three, the load of experts without transition counts is spread like the mean of the previous batch. If the
planner receives no transitions, that is the whole load.
"""


def expect_loads(
    forecast: Forecast,
    load: Num[jax.Array, "M L E"],
    state: Any,
    *,
    scope: str,
    transitions: Transitions | None,
) -> tuple[Float[jax.Array, "L E"], Float[jax.Array, "#M L E"], Any]:
    """Forecast the loads of a batch for homes and for replicas.

    Args:
        forecast: a value of `FORECASTS`.
        load: the true loads of the experts.
        state: the forecast's state before the batch.
        scope: how often replicas are chosen: for every ``micro_batch``, or once per ``batch`` by the loads for homes.
        transitions: the transition counts of the batch, or None.

    Returns:
        The loads for homes and the loads for replicas, float32, and the forecast's state after the batch.
    """
    for_homes, expected, state = forecast.update(load, state, transitions)
    return for_homes, for_homes[None] if scope == "batch" else expected, state


class PlacedState(NamedTuple):
    """The state of planners that place and copy experts by a forecast."""

    seen: Any
    """The state of the forecast."""
    home: Int[jax.Array, "L E"]
    """Flat home slot of each expert in the previous batch; EMPTY in a layer that had no forecast yet."""


def plan_expected(
    pack: Callable[..., Array], fill: Callable[..., Plan], *, loads: str, scope: str, keep_homes: bool
) -> Planner:
    """Make a planner that places and copies experts by a forecast.

    Args:
        pack: the function that chooses homes, ``(for_homes[L E], topology) -> home[L E]``.
        fill: the function that makes the plan, ``(request, expected[#M L E], home[L E], topology) -> Plan``; the quotas
            must sum to the request's load.
        loads: the name of the forecast in `FORECASTS`.
        scope: how often replicas are chosen: once per ``batch``, or for every ``micro_batch``.
        keep_homes: whether to keep the homes of the first batch that has a forecast. Otherwise homes are packed again
            in every batch.

    Returns:
        A Planner whose state is a PlacedState. It uses transitions if the forecast does. With ``loads="true"`` it plans
        from ``request.predicted`` in place of the true loads, if that is given.

    Raises:
        ValueError: if ``loads`` or ``scope`` is unknown.
    """
    for name, value, options in (("loads", loads, FORECASTS), ("scope", scope, SCOPES)):
        if value not in options:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(options)}")
    forecast = FORECASTS[loads]

    def init(topology: Topology, num_layers: int, *, key: PRNGKeyArray) -> PlacedState:
        no_homes = jnp.full((num_layers, topology.num_experts), EMPTY, jnp.int32)
        return PlacedState(forecast.init(topology, num_layers, key=key), no_homes)

    @compiled_update
    def update(request: PlanRequest, state: PlacedState, topology: Topology) -> tuple[Plan, PlacedState]:
        load = request.by_expert
        predicted = request.predicted if loads == "true" else None
        known = load if predicted is None else jnp.asarray(predicted)
        for_homes, expected, forecast_state = expect_loads(
            forecast, known, state.seen, scope=scope, transitions=request.transitions
        )
        home = pack(for_homes, topology)
        if keep_homes:
            home = jnp.where(state.home == EMPTY, home, state.home)
        no_forecast = (for_homes.sum(-1) == 0) & (state.home[:, 0] == EMPTY)
        next_home = jnp.where(no_forecast[:, None], EMPTY, home)
        return fill(request, expected, home, topology), PlacedState(forecast_state, next_home)

    return Planner(init, update, uses_transitions=forecast.uses_transitions, uses_predictions=loads == "true")
