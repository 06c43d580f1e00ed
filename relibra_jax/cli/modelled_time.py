"""The cost model of a trace, which is scaled to the size of real micro-batches."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from relibra_jax.cli.batching import Batches
from relibra_jax.contract.types import Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS, Cluster
from relibra_jax.cost.memory import check_rank_memory
from relibra_jax.cost.models import MODELS, Model
from relibra_jax.evaluation import Costs
from relibra_jax.support.limits import COST_MAX, check_integer, check_positive
from relibra_jax.support.suggestions import suggest_names
from relibra_jax.traces.trace import Trace


def find_model(name: str) -> Model:
    """Look up a model of `MODELS` by its name.

    Raises:
        ValueError: if there is no model of this name. The message suggests similar names.
    """
    return _look_up("model", name, MODELS)


def find_cluster(name: str) -> Cluster:
    """Look up a cluster of `CLUSTERS` by its name.

    Raises:
        ValueError: if there is no cluster of this name. The message suggests similar names.
    """
    return _look_up("cluster", name, CLUSTERS)


def _look_up[Entry](kind: str, name: str, table: Mapping[str, Entry]) -> Entry:
    if name not in table:
        raise ValueError(f"{kind}={name!r} must be one of {', '.join(table)}{suggest_names(name, table)}")
    return table[name]


def make_cost_model(costs: Costs, trace: Trace, batches: Batches, topology: Topology) -> CostModel:
    """Make the cost model that scales the micro-batches of a trace to ``costs.tokens_per_rank``.

    Attention is priced as if sequences were longer than in the trace, so that their mean length is ``costs.context``.

    Args:
        costs: the names of the cluster and the model, the way in which layers run, and the sizes that the trace is
            scaled to.
        trace: the trace, which gives the number of experts and top-k.
        batches: the batches of the trace, which give the number of tokens in a micro-batch and in a sample.
        topology: the expert-parallel group.

    Raises:
        ValueError: if the cluster or the model is unknown, a number is out of its range, the topology has fewer experts
            than the trace, a layer takes more than `COST_MAX` seconds, or the resident slots do not fit the memory of a
            rank.
    """
    published, cluster = find_model(costs.model), find_cluster(costs.cluster)
    check_positive("context", costs.context)
    check_positive("tokens_per_rank", costs.tokens_per_rank)
    check_integer("updates", costs.updates, least=1)
    if costs.updates > batches.num_micro_batches:
        raise ValueError(f"updates={costs.updates} exceeds micro_batches={batches.num_micro_batches}")
    model = dataclasses.replace(
        published, top_k=trace.replay.expert_ids.shape[-1], num_experts=trace.num_experts
    )
    lengths = np.concatenate([replay.mask.sum(1) for replay in batches.replays]).astype(float)
    tokens = max(lengths.sum() / len(batches.replays), 1.0)
    cost_model = CostModel(
        cluster=cluster,
        model=model,
        path=costs.dispatch,
        between=costs.exchange,
        inside=costs.exchange,
        rows=costs.row_layout,
        updates=costs.updates,
        recompute=costs.recompute,
        shards=costs.shards,
        scale=float(costs.tokens_per_rank * topology.num_ranks * batches.num_micro_batches / tokens),
        stretch=float(costs.context / max(lengths.mean(), 1.0)),
    )
    # One layer on a rank that has all tokens of a batch, in samples as long as the longest: no modelled time is longer.
    cost = cost_model.price(topology)
    parts = (cost.token, cost.head, lengths.max() * cost.pair, model.top_k * cost.copy, cost.crossing)
    seconds = float(tokens * sum(parts))
    if not seconds <= COST_MAX:
        raise ValueError(
            f"context={costs.context} and tokens_per_rank={costs.tokens_per_rank} give {seconds:.3g} s per layer, more"
            f" than {COST_MAX:g}"
        )
    if topology.resident_slots:
        check_rank_memory(topology, model, cluster=cluster, shards=costs.shards)
    return cost_model
