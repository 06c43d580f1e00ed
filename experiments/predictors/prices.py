"""The modelled time of the layers under a prediction, in the parts of MoE-GPS (arXiv 2506.07366).

What is predicted decides which experts are copied. Two kinds of prediction differ in what else they cost and save:

    distribution only   the shares of the experts in the batch before. It costs nothing, and copies stay where they are
                        from micro-batch to micro-batch
    token to expert     the experts of every token, from a table or a network. A network takes time, the more the more
                        accurate it is. Copies follow the micro-batch. The paper's system also sends a token to the rank
                        of its predicted expert before its router has run, so that rightly predicted copies skip
                        dispatch. Layers of relibra_jax cannot: the token's row exists only after attention

Times of attention, experts and exchanges are those of `relibra_jax.cost`, forward only, and of `experiments.deploy` for
attention to a cache. A copy that the rank did not hold in the micro-batch before is sent while attention runs; the rest
of that time is exposed. A predictor's own time is the longer of its products and of reading its weights.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from experiments.deploy.costs import attention_time
from experiments.deploy.serving import Serving
from experiments.predictors.loads import Load
from relibra_jax.contract.types import EMPTY, Topology
from relibra_jax.cost.cost_model import COMPUTE_BYTES, CostModel
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.evaluation.comparison import run_planner
from relibra_jax.evaluation.outcome import Outcome
from relibra_jax.evaluation.predictors import Network, Predictor, make_predictors
from relibra_jax.evaluation.setting import Setting

ACCURACIES: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""The accuracies of simulated networks."""
NONE, DISTRIBUTION, REPLAY = "none", "the last batch", "replay"
"""The names of predictors that predict no token."""


def predicts_tokens(name: str) -> bool:
    """Return whether a predictor predicts the experts of every token, by its name."""
    return name not in (NONE, DISTRIBUTION, REPLAY)


def network_cost(accuracy: float) -> float:
    """Return the forward time of a network as a share of that of a layer's products: exponential, as the paper's fit.

    It goes through the assumed defaults of ``relibra advise``: 0.1% at 50%, 1% at 70% and 10% at 90%.

    Args:
        accuracy: the share of token copies that it predicts right.

    >>> [round(network_cost(accuracy), 4) for accuracy in (0.5, 0.7, 0.9)]
    [0.001, 0.01, 0.1]
    """
    return 0.001 * 10 ** ((accuracy - 0.5) / 0.2)


class Times(NamedTuple):
    """The modelled seconds of the layers of a batch under a prediction, as five parts that add up to the total."""

    attention: float
    """Attention and its projections."""
    experts: float
    """The routed experts on the slowest rank, with the gathers of their rows."""
    exchange: float
    """Dispatch and combine."""
    copies: float
    """Sending copies of experts, where attention does not hide it."""
    predictor: float
    """The predictor."""
    skipped: float
    """Not a part: the time of dispatch for rightly predicted copies, which the paper's system saves."""

    @property
    def layers(self) -> float:
        """The seconds of attention, experts and exchange."""
        return self.attention + self.experts + self.exchange

    @property
    def total(self) -> float:
        """The seconds of all parts, as layers of relibra_jax would run."""
        return sum(self[:5])

    @property
    def published(self) -> float:
        """The seconds without what the paper's system saves."""
        return self.total - self.skipped


class Priced(NamedTuple):
    """A predictor on one load, priced at several clusters."""

    name: str
    """What it knows."""
    accuracy: float | None
    """The share of token copies that it predicts right; None if it predicts nothing."""
    error: float
    """The error of its distribution, by `relibra_jax.planning.metrics.forecast_error`."""
    imbalance: float
    """The imbalance of rank load over the batch."""
    times: tuple[Times, ...]
    """The times at each cluster."""

    @property
    def by_token(self) -> bool:
        """Whether it predicts the experts of every token, without knowing them."""
        return predicts_tokens(self.name)

    @property
    def is_network(self) -> bool:
        """Whether it is a simulated network."""
        return self.name.startswith("a network")


def price_load(
    load: Load,
    model: Model,
    topology: Topology,
    clusters: Sequence[Cluster],
    *,
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> tuple[list[Priced], float]:
    """Plan a load from what every predictor knows, and price the plans.

    Args:
        load: the load.
        model: the sizes of the model, with the trace's number of experts and top-k.
        topology: the expert-parallel group, with the replica slots that copies may take.
        clusters: the clusters.
        seed: the seed of the networks' errors and of planning.
        progress: a function that is called after each predictor.

    Returns:
        The predictors, of which the first predicts nothing and the last is replay; and the skew: the load of the most
        popular expert over the mean, averaged over layers and micro-batches.

    Raises:
        ValueError: if the load does not fit the topology.
    """
    networks = [Network(accuracy, network_cost(accuracy)) for accuracy in ACCURACIES]
    predictors, _ = make_predictors(load.batches, networks, num_experts=topology.num_experts, seed=seed)
    tokens = np.mean([replay.mask.sum() for replay in load.batches.replays])
    scale = load.tokens_per_rank * topology.num_ranks * load.batches.num_micro_batches / float(tokens)
    costs = [
        CostModel(cluster=cluster, model=model, exchange="ragged", updates=0, recompute=True, scale=scale)
        for cluster in clusters
    ]
    priced, skew = [], 1.0
    for predictor in predictors:
        batches = load.batches._replace(predicted=predictor.predicted)
        outcome = run_planner(
            predictor.name, predictor.entry, Setting(batches, topology, costs[0], seed), timed_runs=0
        )
        times = [_times(predictor, load, outcome, cost) for cost in costs]
        priced.append(
            Priced(
                predictor.name, predictor.accuracy, outcome.forecast_error, outcome.imbalance, tuple(times)
            )
        )
        if predictor.name == NONE:
            of_experts = np.asarray(outcome.batches[0].batch_plan.load).sum((2, 3))
            skew = float((of_experts.max(-1) / of_experts.mean(-1)).mean())
        progress()
    return priced, skew


def _times(predictor: Predictor, load: Load, outcome: Outcome, cost: CostModel) -> Times:
    """Price the plans of a predictor on a cluster."""
    setting, layers = outcome.setting, outcome.rank_load.shape[1]
    outcome = dataclasses.replace(outcome, setting=dataclasses.replace(setting, cost_model=cost))
    parts, visits = outcome.modelled_parts, load.batches.num_micro_batches * layers
    attention = parts["attention"]
    if load.context is not None:
        serving = Serving(
            model=cost.model, attention=cost.cluster, experts=cost.cluster, context=load.context
        )
        attention = visits * float(attention_time(load.tokens_per_rank, 1.0, serving))
    weights = predictor.cost * (cost.model.dense_params + cost.model.top_k * cost.model.expert_params)
    rates = cost.cluster.rates
    predictor_seconds = visits * max(
        2 * weights * load.tokens_per_rank / rates.flops, COMPUTE_BYTES * weights / rates.memory
    )
    return Times(
        attention=attention,
        experts=parts["compute"] + parts["gather"],
        exchange=parts["exchange"],
        copies=_exposed_copies(outcome, cost, attention / visits) * visits,
        predictor=predictor_seconds,
        skipped=(predictor.accuracy or 0.0) * predicts_tokens(predictor.name) * parts["exchange"] / 2,
    )


def _exposed_copies(outcome: Outcome, cost: CostModel, hidden: float) -> float:
    """Return the mean seconds of a layer for which sending copies takes longer than attention, which hides it.

    Each rank receives the copies that it did not hold in the micro-batch before, from the homes of the experts; the
    busiest rank determines the time.

    Args:
        outcome: the plans.
        cost: the cost model.
        hidden: the seconds of attention of a layer.
    """
    plan, topology = outcome.batches[0].batch_plan.plan, outcome.setting.topology
    fetch = float(cost.price(topology).fetch)
    slots = np.asarray(plan.slot_expert)
    slots = slots.reshape(*slots.shape[:2], topology.num_ranks, -1)[..., topology.home_slots :]
    home_rank = np.asarray(plan.home) // topology.home_slots
    seconds = []
    for before, now in itertools.pairwise(slots):
        for layer, copies in enumerate(now):
            busy = np.zeros((2, topology.num_ranks))
            for rank, experts in enumerate(copies):
                new = np.setdiff1d(experts[experts != EMPTY], before[layer, rank])
                busy[0, rank] = len(new)
                np.add.at(busy[1], home_rank[layer, new], 1)
            seconds.append(max(fetch * busy.max() - hidden, 0.0))
    return float(np.mean(seconds))
