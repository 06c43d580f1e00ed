"""Modelled time of a batch that is planned from the loads that a predictor knows, with the overhead of the predictor.

Plans are made from the expected loads and run on the true ones. The planners, the cost model and the batches are
those of every other comparison (`relibra_jax.evaluation.comparison.run_planner`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from relibra_jax.evaluation.advice import TRANSFERS
from relibra_jax.evaluation.comparison import run_planner
from relibra_jax.evaluation.outcome import Outcome
from relibra_jax.evaluation.predictors import Predictor
from relibra_jax.evaluation.setting import Setting

COMMUNICATION: Final = ("exchange", *TRANSFERS)
"""The parts of a batch's modelled time in which ranks exchange tokens or experts."""


class PredictorPrice(NamedTuple):
    """The price of a predictor, and what it gains."""

    name: str
    """What the predictor knows."""
    accuracy: float | None
    """The share of token copies that it predicts right; None if it predicts nothing."""
    error: float | None
    """The error rate of its distribution, by `relibra_jax.planning.metrics.forecast_error`; None if it has none."""
    imbalance: float
    """The imbalance of rank load over the batch."""
    compute: float
    """The seconds of a batch without the parts below."""
    communication: float
    """The seconds in which ranks exchange tokens or experts."""
    overhead: float
    """The seconds of the predictor, as if nothing hid them."""
    seconds: float
    """The modelled time of a batch with the overhead."""
    gain: float
    """The modelled time of the first predictor's batch divided by this one, less 1."""


def price_predictors(
    predictors: Sequence[Predictor], setting: Setting, *, progress: Callable[[], None] = lambda: None
) -> list[PredictorPrice]:
    """Plan the batches of a setting from what every predictor knows, and compute the modelled time of the plans.

    Args:
        predictors: the predictors. The first one predicts nothing.
        setting: the batches, ranks and costs.
        progress: a function that is called after each predictor.

    Raises:
        ValueError: if a planner rejects its input.
    """
    prices: list[PredictorPrice] = []
    for predictor in predictors:
        batches = setting.batches._replace(predicted=predictor.predicted)
        own = dataclasses.replace(setting, batches=batches)
        outcome = run_planner(predictor.name, predictor.entry, own, timed_runs=0)
        overhead = overhead_seconds(predictor, outcome)
        communication = sum(outcome.modelled_parts[part] for part in COMMUNICATION)
        seconds = outcome.modelled_seconds + overhead
        prices.append(
            PredictorPrice(
                predictor.name,
                predictor.accuracy,
                None if predictor.accuracy is None else outcome.forecast_error,
                outcome.imbalance,
                outcome.modelled_seconds - communication,
                communication,
                overhead,
                seconds,
                (prices[0].seconds if prices else seconds) / seconds - 1,
            )
        )
        progress()
    return prices


def overhead_seconds(predictor: Predictor, outcome: Outcome) -> float:
    """Compute the seconds that a predictor adds to a batch, as if nothing hid them.

    Every rank runs the predictor on the tokens that it holds, once, and waits for the rank with the most tokens in each
    micro-batch. The price of the products of a layer's forward pass is that of the cost model: attention, shared
    experts and K routed experts, without the products of queries and keys. What is sent crosses to other nodes.

    Args:
        predictor: the predictor.
        outcome: the batches that were planned with it.
    """
    cost_model, topology = outcome.cost_model, outcome.setting.topology
    forward = cost_model.price(topology, updates=0, recompute=True)
    _, _, layers, top_k = outcome.batches[0].replay.expert_ids.shape
    busiest = [batch.rank_tokens.max((1, 2)).sum() for batch in outcome.batches]
    tokens = float(np.mean(busiest)) / cost_model.data_parallel
    bandwidth = cost_model.cluster.slow_bandwidth * cost_model.cluster.network_efficiency
    computed = predictor.cost * layers * (float(forward.token) + top_k * float(forward.copy))
    return tokens * (computed + cost_model.scale * predictor.bytes_per_token / bandwidth)
