"""What every planner of a comparison is given: the batches of a trace, the ranks, and the price."""

import dataclasses

import numpy as np

from relibra_jax.contract.types import Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.least_time import least_time
from relibra_jax.cost.memory import check_rank_memory
from relibra_jax.cost.models import MODELS
from relibra_jax.evaluation.batches import Batches, make_batches
from relibra_jax.evaluation.settings import Batching, Costs
from relibra_jax.routing.exchange_rules import choose_path
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.counted import counted
from relibra_jax.support.limits import COST_MAX, check_integer, check_positive
from relibra_jax.support.suggestions import look_up
from relibra_jax.traces.trace import Trace


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """The batches, the ranks and the price that every planner of a comparison is given; `make_setting` makes one."""

    batches: Batches
    """The batches of a trace, in the order in which they are planned."""
    topology: Topology
    """The expert-parallel group."""
    cost_model: CostModel
    """The cost model of plans and reports."""
    seed: int = 0
    """The seed of the planners' random keys."""
    _least_seconds: dict[bool, float] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def least_seconds(self, *, across_nodes: bool) -> float:
        """Return the mean over the measured batches of `relibra_jax.cost.least_time`; it is computed only once.

        Args:
            across_nodes: whether replicas may be on any node.
        """
        if across_nodes not in self._least_seconds:
            cost = self.cost_model.price(self.topology)
            bounds = [
                least_time(
                    replay,
                    self.topology,
                    cost=cost,
                    across_nodes=across_nodes,
                    micro_batches=self.batches.num_micro_batches // cost.data_parallel,
                )
                for replay in self.batches.replays[self.batches.history :]
            ]
            self._least_seconds[across_nodes] = float(np.mean([bound.total for bound in bounds]))
        return self._least_seconds[across_nodes]


@checks_arguments
def make_setting(
    trace: Trace,
    topology: Topology,
    *,
    batching: Batching = Batching(),  # noqa: B008
    cost: Costs | CostModel = Costs(),  # noqa: B008
) -> Setting:
    """Divide a trace into batches, and price them.

    Args:
        trace: the trace.
        topology: the expert-parallel group.
        batching: how the trace is divided into batches and micro-batches, and the seed of planning.
        cost: what is priced. `Costs` names hardware and a model, and scales the trace to the size of real
            micro-batches. A `CostModel` is used as it is, which is striped only with ``striped=True``.

    Raises:
        ValueError: if the settings do not fit each other or the trace; a name is unknown; a number is out of its range;
            the topology has fewer experts than the trace; a layer takes more than `COST_MAX` seconds; the resident
            slots do not fit the memory of a rank; or a `CostModel` is of split sequences.

    >>> from relibra_jax.evaluation import Ranks
    >>> from relibra_jax.traces.read import read_trace
    >>> trace = read_trace("recorded")
    >>> setting = make_setting(trace, Ranks().topology(trace.num_experts), batching=Batching(micro_batches=2))
    >>> len(setting.batches.replays), setting.batches.num_micro_batches
    (2, 2)
    """
    batches = make_batches(trace, batching, topology)
    cost_model = cost if isinstance(cost, CostModel) else _scaled_model(cost, trace, batches, topology)
    if cost_model.sequences == "split":
        raise ValueError("cost: sequences='split' cannot be compared here, only planned for; use 'packed'")
    if topology.resident_slots:
        check_rank_memory(topology, cost_model.model, cluster=cost_model.cluster, shards=cost_model.shards)
    return Setting(batches, topology, cost_model, batching.seed)


def _scaled_model(costs: Costs, trace: Trace, batches: Batches, topology: Topology) -> CostModel:
    """Return the cost model that scales micro-batches to ``costs.tokens_per_rank``, and samples to ``costs.context``.

    Attention is priced as if samples were longer than in the trace, so that their mean length is ``costs.context``.
    """
    published = look_up("model=", costs.model, MODELS)
    cluster = look_up("cluster=", costs.cluster, CLUSTERS)
    check_positive("context", costs.context)
    check_positive("tokens_per_rank", costs.tokens_per_rank)
    check_integer("updates", costs.updates, least=1)
    if costs.updates > batches.num_micro_batches:
        raise ValueError(f"updates={costs.updates} exceeds micro_batches={batches.num_micro_batches}")
    top_k = trace.replay.expert_ids.shape[-1]
    _check_ragged(costs, topology, top_k)
    lengths = np.concatenate([replay.mask.sum(1) for replay in batches.replays]).astype(float)
    tokens = max(lengths.sum() / len(batches.replays), 1.0)
    _check_tiles(costs, float(cluster.tile), tokens / (topology.num_ranks * batches.num_micro_batches))
    cost_model = CostModel(
        cluster=cluster,
        model=dataclasses.replace(published, top_k=top_k, num_experts=trace.num_experts),
        path=costs.dispatch,
        exchange=costs.exchange,
        sequences=costs.sequence_layout,
        updates=costs.updates,
        recompute=costs.recompute,
        shards=costs.shards,
        scale=float(costs.tokens_per_rank * topology.num_ranks * batches.num_micro_batches / tokens),
        stretch=float(costs.context / max(lengths.mean(), 1.0)),
    )
    cost_model = cost_model.with_striping(topology)
    # One layer on a rank that has all tokens of a batch, in samples as long as the longest: no modelled time is longer.
    cost = cost_model.price(topology)
    parts = (cost.token, cost.head, lengths.max() * cost.pair, top_k * cost.copy, cost.crossing)
    seconds = float(tokens * sum(parts))
    if not seconds <= COST_MAX:
        raise ValueError(
            f"context={costs.context} and tokens_per_rank={costs.tokens_per_rank} give {seconds:.3g} s per layer, more"
            f" than {COST_MAX:g}"
        )
    return cost_model


def _check_ragged(costs: Costs, topology: Topology, top_k: int) -> None:
    """Raise ValueError if a ragged exchange would be flat over several nodes, or hierarchical on a single one."""
    if costs.exchange != "ragged":
        return
    nodes = topology.num_nodes
    path = choose_path(topology, top_k, costs.exchange) if costs.dispatch == "auto" else costs.dispatch
    needed = "hierarchical" if nodes > 1 else "flat"
    if path != needed:
        raise ValueError(
            f"exchange='ragged' on {counted(nodes, 'node')} needs dispatch={needed!r}, not {path!r}, or use another"
            " exchange"
        )


def _check_tiles(costs: Costs, tile: float, held: float) -> None:
    """Raise ValueError if so few tokens are modelled that a tile of a product has more than `COST_MAX` of the trace's.

    Args:
        costs: what is priced.
        tile: the number of token copies that fill a tile.
        held: the mean number of the trace's tokens that a rank has in a micro-batch.
    """
    least = tile * held / COST_MAX
    if least > costs.tokens_per_rank:
        raise ValueError(
            f"tokens_per_rank={costs.tokens_per_rank} must be above {1.1 * least:.2g} for a trace of {held:.3g} tokens"
            " per rank and micro-batch"
        )
