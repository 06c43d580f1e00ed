"""The compared runs, each prepared by `relibra_jax.nnx.Balancer` and trained as the Flax guide trains."""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import jax
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx
from jaxtyping import Int

from experiments.contenders import route_evenly
from experiments.miniature.peers import PEERS, count_needs, make_peer_policy
from experiments.miniature.policy import FLOAT, VOCABULARY, Sizes, make_policy
from experiments.miniature.rates import PASSES, Rates
from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.types import EMPTY, BatchPlan, RoutingReplay, Topology
from relibra_jax.cost.batch_time import batch_time
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.traffic import count_traffic
from relibra_jax.evaluation.variants import with_samples_assigned
from relibra_jax.execution.exchange import KINDS
from relibra_jax.nnx import Balancer, ExpertParallel, PreparedBatch, accumulate_gradients, expert_mesh
from relibra_jax.nnx.batch_sequences import whole_array
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.routing.exchange_rules import AUTO
from relibra_jax.routing.visits import node_visits
from relibra_jax.traces.trace import Trace


class Contender(NamedTuple):
    """A compared run: its planner and the slots of its ranks."""

    entry: PlannerEntry
    """The planner, and how samples are assigned."""
    replica_slots: int = 0
    """The number of replica slots of a rank."""
    resident_slots: int = 0
    """The number of resident slots of a rank."""
    even: bool = False
    """Whether routing is replaced by even routing."""
    exchange: str = AUTO
    """The kind of token exchange."""
    striped: bool | None = None
    """Whether the ranks of a node deal tokens to each other before dispatch; None for the balancer's rule."""
    pieces: int = 1
    """The number of pieces in which layers dispatch tokens."""
    late_replicas: bool = False
    """Whether home experts run while replicas arrive."""
    peer: str | None = None
    """The expert layer of another project, a name of `experiments.miniature.peers.PEERS`; None for `MoELayer`."""


EXCHANGES: Final[dict[str, dict[str, Any]]] = {
    AUTO: {},
    **{kind: {"exchange": kind} for kind in KINDS},
    **{f"{kind}, not striped": {"exchange": kind, "striped": False} for kind in KINDS},
    **{f"{kind}, 2 pieces": {"exchange": kind, "pieces": 2} for kind in KINDS},
}
"""The exchanges of tokens that a run can have, by name: settings of `Contender`."""


def contenders(replica_slots: int, exchanges: tuple[str, ...] = (AUTO,)) -> dict[str, Contender]:
    """Return the compared runs by name.

    Args:
        replica_slots: the number of replica slots of a rank, for all planners that replicate.
        exchanges: the exchanges of tokens, names of `EXCHANGES`, each of which all planners run. The names of runs have
            all but ``auto``. The expert layers of other projects have their own.

    >>> [name for name in contenders(1, ("auto", "fitted")) if "static" in name]
    ['static', 'static, fitted']
    """
    runs = {
        name if exchange == AUTO else f"{name}, {exchange}": each._replace(**EXCHANGES[exchange])
        for exchange in exchanges
        for name, each in _contenders(replica_slots).items()
    }
    return runs | {name: Contender(PLANNERS["static"], striped=False, peer=name) for name in PEERS}


def _contenders(replica_slots: int) -> dict[str, Contender]:
    assigned = with_samples_assigned("relibra")
    rivals = {"EPLB": "eplb", "LPLB": "lplb", "UltraEP": "ultraep", "MoonEP": "moonep", "LAER": "laer"}
    return {
        "static": Contender(PLANNERS["static"]),
        **{label: Contender(PLANNERS[name], replica_slots) for label, name in rivals.items()},
        "FEPLB": Contender(PLANNERS["feplb"], replica_slots),
        "FEPLB, replicas late": Contender(PLANNERS["feplb"], replica_slots, late_replicas=True),
        "ReLibra, samples in given order": Contender(PLANNERS["relibra"], replica_slots),
        "ReLibra": Contender(assigned, replica_slots),
        **{
            f"ReLibra, {number} resident{'s' * (number > 1)}": Contender(assigned, replica_slots, number)
            for number in (1, 2)
        },
        BALANCED: Contender(PLANNERS["static"], even=True, striped=False),
    }


CROSSINGS: Final = 4
"""The exchanges of a row in a layer: dispatch and combine, forward and backward."""
RETURN: Final = 2
"""The transfers of a resident in an update: its weights out, its gradient back."""
BALANCED: Final = "forced balanced"
"""The name of the run with the same tokens, routed to experts so that all of them get the same number."""


def baseline_of(names: Iterable[str]) -> str:
    """Return the name of the run that the others are compared with: the forced balanced one with the first exchange.

    >>> baseline_of(contenders(1, ("fitted", "padded")))
    'forced balanced, fitted'
    """
    return next(name for name in names if name.startswith(BALANCED))


class Draw(NamedTuple):
    """The samples of one batch."""

    tokens: np.ndarray
    """The tokens ``[B, T]``."""
    replay: RoutingReplay
    """The recorded routing, ``[B, T, L, K]``."""


def draw_batches(trace: Trace, *, samples: int, layers: int, seed: int) -> list[Draw]:
    """Draw a batch from a trace, and the batch before it from the other samples.

    Args:
        trace: the recorded routing, with samples aligned to the left.
        samples: the number of samples of the batch.
        layers: the number of layers, evenly spaced.
        seed: the seed of the order of samples and of their tokens.

    Returns:
        The batch before, which has at most as many samples, and the batch.

    Raises:
        ValueError: if the trace has too few samples or layers.
    """
    ids, mask = (np.asarray(leaf) for leaf in trace.replay)
    if not 0 < samples < len(mask) or layers > ids.shape[2]:
        raise ValueError(
            f"{trace.name} has {len(mask)} samples x {ids.shape[2]} layers: a batch of samples={samples} needs at least"
            f" one more for the batch before it, and layers={layers} at most those of the trace"
        )
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(mask))
    spaced = np.linspace(0, ids.shape[2] - 1, layers).round().astype(int)
    return [
        Draw(
            rng.integers(VOCABULARY, size=mask[part].shape, dtype=np.int32),
            RoutingReplay(ids[part][:, :, spaced], mask[part]),
        )
        for part in (order[samples : 2 * samples], order[:samples])
    ]


def even_routing(draw: Draw, num_experts: int) -> Draw:
    """Return the same tokens, routed so that every expert of a layer receives the same number."""
    ids, mask = (np.asarray(leaf) for leaf in draw.replay)
    even = np.maximum(route_evenly(ids, mask, num_experts), 0)
    return draw._replace(replay=RoutingReplay(even.astype(ids.dtype), mask))


class Run:
    """One contender with its model, after its second batch is prepared: homes come from the first.

    Args:
        contender: the planner and its slots.
        grid: the numbers of nodes and of ranks of a node.
        num_experts: the number of experts of a layer.
        sizes: the sizes of the model.
        cost: the cost model for which it plans.
        micro_batches: the number of micro-batches of an update.
        draws: the first and the second batch.
        path: ``flat``, ``hierarchical`` or ``auto``.
    """

    def __init__(
        self,
        contender: Contender,
        grid: tuple[int, int],
        num_experts: int,
        *,
        sizes: Sizes,
        cost: CostModel,
        micro_batches: int,
        draws: list[Draw],
        path: str,
    ):
        nodes, local = grid
        topology = Topology(
            num_nodes=nodes,
            ranks_per_node=local,
            num_experts=num_experts,
            replica_slots=contender.replica_slots,
            resident_slots=contender.resident_slots,
        )
        if contender.even:
            draws = [even_routing(draw, num_experts) for draw in draws]
        entry = contender.entry
        parallel = ExpertParallel(
            mesh=expert_mesh(topology),
            topology=topology,
            path=path,
            exchange=contender.exchange,
            striped=contender.striped,
            pieces=contender.pieces,
            late_replicas=contender.late_replicas,
            across_nodes=entry.across_nodes,
        )
        self.model, self.optimizer = make_policy(sizes, topology)
        self.balancer = Balancer(
            entry.planner,
            parallel,
            num_layers=sizes.layers,
            num_micro_batches=micro_batches,
            key=jax.random.key(0),
            cost=cost,
            assign=entry.assign,
            sequences="packed",
        )
        for draw in draws:
            self.balancer.discard()
            self.batch = self.balancer.prepare(self.model, self.optimizer, draw.replay)
        self.contender, self.sizes, self.draw = contender, sizes, draws[-1]
        tokens, mask = draws[-1].tokens, draws[-1].replay.mask
        self.sequences = self.batch.to_ranks((tokens, mask, draws[-1].replay)), self.batch.packing
        if contender.peer is not None:
            (_, _, replay), packing = self.sequences
            assert packing is not None, "sequences are packed"
            routes, segments = whole_array(replay.expert_ids), whole_array(packing.segments)
            needs = count_needs(routes, segments >= 0, topology.num_ranks, num_experts)
            self.model, self.optimizer = make_peer_policy(
                contender.peer, sizes, num_experts, parallel.mesh, needs, like=self.model
            )

    def update(self) -> jax.Array:
        """Run one update, and return its loss."""
        return update(self.model, self.optimizer, self.batch, self.sequences)

    def program(self) -> str:
        """Return the text of the compiled update."""
        return update.lower(self.model, self.optimizer, self.batch, self.sequences).compile().as_text() or ""

    @property
    def visits(self) -> Int[np.ndarray, "M L P V"] | None:
        """The tokens that each rank sends to each node, or on a single node to each rank."""
        visits, parallel = self.batch.visits, self.batch.parallel
        if visits is None or parallel.topology.num_nodes > 1:
            return visits
        plan = _on_host(self.batch.batch_plan)
        counted = node_visits(self.draw.replay, plan, parallel.topology, striped=parallel.is_striped)
        return np.asarray(counted)

    def modelled(self, rates: Rates) -> dict[str, float]:
        """Return the modelled seconds of the update by part, without the move of experts before it.

        To the parts of `relibra_jax.cost.batch_time` come the sums of dense gradients in each layer and micro-batch.
        """
        plan, parallel = self.batch.batch_plan, self.batch.parallel
        topology, cost = parallel.topology, self.balancer.cost
        assert cost is not None
        price = cost.price(topology)
        lengths = np.asarray(self.draw.replay.mask).sum(1)
        time = batch_time(_on_host(plan), lengths, topology, price, visits=self.visits)
        return {part: float(value) for part, value in time.parts().items()} | {"sums": self._sums(rates)}

    def predicted(self, rates: Rates) -> float:
        """Return the seconds of the update that the balancer itself expects of its plan, with the same sums as above.

        Its crossings are those with which it planned, and not counted ones (`PreparedBatch.modelled_times`).
        """
        times = self.batch.modelled_times
        assert times is not None
        return float(times.plan.total - times.plan.reorder) + self._sums(rates)

    def _sums(self, rates: Rates) -> float:
        micro_batches, layers = self.batch.batch_plan.load.shape[:2]
        return micro_batches * layers * rates.sums

    @property
    def needed(self) -> dict[str, int]:
        """The bytes that all ranks together need to send over each network, without the padding of lanes.

        They are the rows of dispatch and combine, forward and backward; replicas and residents, out and back. For the
        layer of another project they are those of static placement.
        """
        plan, topology = _on_host(self.batch.batch_plan), self.batch.parallel.topology
        layers, sizes = plan.layer_plans(), self.sizes
        rows = count_traffic(layers, topology, visits=self.visits)
        row = CROSSINGS * sizes.width * FLOAT
        expert = 3 * sizes.width * sizes.expert_width * FLOAT
        replicas = np.asarray(plan.plan.slot_expert)[..., topology.held_slots :]  # [M L N G R]
        node = np.asarray(plan.plan.home) // (topology.home_slots * topology.ranks_per_node)
        layer, own_node = np.ogrid[: replicas.shape[1], : topology.num_nodes]
        home_node = node[layer[..., None, None], replicas]
        across = (replicas != EMPTY) & (home_node != own_node[..., None, None])
        inside = (replicas != EMPTY) & ~across
        residents = np.asarray(resident_experts(plan.plan, topology)) != EMPTY
        transfers = PASSES * int(across.sum()) + RETURN * int(residents.sum())
        return {
            "slow": row * int(rows.slow_sent.sum()) + expert * transfers,
            "fast": row * int(rows.fast_sent.sum()) + expert * PASSES * int(inside.sum()),
        }


def _on_host(plan: BatchPlan) -> BatchPlan:
    return jax.tree.map(np.asarray, plan)


@nnx.jit
def update(model, optimizer, batch: PreparedBatch, sequences):
    """Accumulate gradients over all micro-batches, clip them and update the model once; return the loss."""

    def objective(model, sequences, layers):
        (tokens, mask, replay), packing = sequences
        logits = model(tokens, replay.expert_ids, packing, layers, batch.parallel)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        loss = (losses * mask).sum()
        return loss, loss

    gradients, losses = accumulate_gradients(model, objective, batch, sequences)
    optimizer.update(model, gradients)
    return losses.sum()
