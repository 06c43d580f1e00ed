"""What the parts of ReLibra gain over baselines in many settings: how even ranks become, and modelled speed.

ReLibra (arXiv 2605.08639) says that joint replication is 9 to 12% faster than splitting tokens alone and 12 to 24% than
placing replicas alone, and annealed homes 5 to 16% than a greedy reordering (LPT). What exactly it compared with is not
published. So each baseline here is as strong as we can make it, and works as published systems do.

- *Balance* (`sweep_balance`): how uneven ranks remain under each planner. The figures are counted. If the fullest ranks
  of two plans have loads a and b, one is at most a / b - 1 faster, which it is if nothing else takes time.
  `waiting_share` is how much of a modelled balanced run waits for the fullest rank.
- *Homes* (`sweep_homes`): the modelled speed of annealed homes over LPT, with the same joint replication.

`experiments.claims.conditions` runs both.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from experiments.claims.settings import PAPER_MODELS, SYNTHETIC
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.planner import Placement, Planner, PlanRequest
from relibra_jax.contract.replay import sample_load
from relibra_jax.contract.types import Array, Topology
from relibra_jax.cost.batch_time import balanced_time
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.evaluation import Batching, Costs, Ranks, ablation, make_setting, run_planner
from relibra_jax.evaluation.variants import replicate_nothing
from relibra_jax.planning.ablation.token_splits import (
    replicate_with_eplb_places,
    replicate_with_even_split,
    replicate_with_fixed_places,
)
from relibra_jax.planning.baselines.eplb import eplb, pack_homes
from relibra_jax.planning.baselines.lplb import lplb
from relibra_jax.planning.baselines.static import static
from relibra_jax.planning.metrics import batch_imbalance
from relibra_jax.planning.planners import PlannerEntry
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.replication import replicate_experts
from relibra_jax.traces.calibrated import SYNTHETIC as SIZES
from relibra_jax.traces.calibrated import draw_trace
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import Trace, some_layers

LAYERS: Final = 2
MICRO_BATCHES: Final = 32
"""The micro-batches of a batch in the sweep of balance, as in the paper."""
RANKS_PER_NODE: Final = 8
SAMPLES: Final = (2, 4, 8, 32, 128)
"""The samples of a micro-batch. The paper's 1,024 samples in 32 micro-batches on 160 GPUs are 3 to 6 in each group of
16 or 32 ranks if every group runs 32 micro-batches, and 32 if there is one group."""
SKEWS: Final = (0.5, 1.0, 2.0)
"""Factors of the standard deviations of popularity and topics in `relibra_jax.traces.calibrated`."""


def lpt_homes(
    request: PlanRequest,
    previous_home: Int[Array, "L E"],
    topology: Topology,
    *,
    key: Array,
    nodes: bool = True,
) -> Placement:
    """Give the heaviest expert of a batch to the lightest node, then rank, that has room; a `Place`.

    Args:
        request, previous_home, topology, key: the arguments of a `relibra_jax.contract.planner.Place`; of the request,
            only loads are used, and the key is not used.
        nodes: whether experts go to nodes first. Otherwise all ranks are alike.
    """
    del previous_home, key
    load, domains = request.by_expert.sum(0), topology.num_nodes if nodes else 1
    home = pack_homes(load, topology, num_groups=topology.num_experts if nodes else 1, num_nodes=domains)
    return Placement.without_residents(home, topology)


_lpt: Final = functools.partial(relibra, place=lpt_homes)
JOINT: Final = "joint"
REPLICATION: Final[Mapping[str, Planner]] = {
    "static": static(),
    JOINT: _lpt(replicate=replicate_experts),
    "splits, places by EPLB in each micro-batch": _lpt(replicate=replicate_with_eplb_places),
    "splits, places along LPLB's graph in each micro-batch": lplb(),
    "splits, places along LPLB's graph, once a batch": lplb(scope="batch"),
    "splits, places by EPLB, once a batch": _lpt(replicate=replicate_with_fixed_places),
    "even split, places of joint replication": _lpt(replicate=replicate_with_even_split),
    "even split, places by EPLB in each micro-batch (EPLB+)": eplb(),
    "even split, places by EPLB, once a batch": eplb(scope="batch"),
}
"""Joint replication and its baselines: some split tokens as well as the places of their replicas allow, others split
them evenly over places. All but ``static`` have the homes of `lpt_homes`."""
BALANCED_HOMES: Final[Mapping[str, Planner]] = {
    "annealed, joint": relibra(replicate=replicate_experts),
    "LPT, joint": REPLICATION[JOINT],
    "annealed, alone": ablation()["+ reorder"].planner,
    "LPT, alone": relibra(place=functools.partial(lpt_homes, nodes=False), replicate=replicate_nothing),
}
"""Homes annealed for balance and by LPT, with joint replication and without replicas."""


class Loads(NamedTuple):
    """The expert loads of the samples of one trace."""

    name: str
    """The name of the trace, and how much it is skewed."""
    counts: Int[np.ndarray, "B L E"]
    """The token copies of each sample."""


def read_loads(trace: str | None) -> list[Loads]:
    """Return the loads of a recorded trace, and of synthetic ones of 128 experts, each skewed by a factor of `SKEWS`.

    Raises:
        ValueError: if the trace cannot be read, or has fewer samples than the longest micro-batch.
    """
    traces = [read_trace(trace)] + [skewed_trace(skew) for skew in SKEWS]
    if len(traces[0].replay.expert_ids) < max(SAMPLES):
        raise ValueError(
            f"trace {traces[0].name} has {len(traces[0].replay.expert_ids)} samples, and the longest micro-batch of the"
            f" sweep needs {max(SAMPLES)}"
        )
    some = (some_layers(each, LAYERS) for each in traces)
    return [
        Loads(each.name, np.asarray(sample_load(each.replay, num_experts=each.num_experts))) for each in some
    ]


def skewed_trace(skew: float, *, samples: int = 512) -> Trace:
    """Draw a trace of 128 experts whose popularity and topics vary ``skew`` times as much as in ``synthetic-128``."""
    size = SIZES[SYNTHETIC]
    calibration = dataclasses.replace(
        size.calibration, popularity=skew * size.calibration.popularity, topic=skew * size.calibration.topic
    )
    trace = draw_trace(
        calibration, samples=samples, num_experts=size.num_experts, top_k=size.top_k, layers=LAYERS
    )
    return trace._replace(name=f"{trace.name}, skew x {skew:g}")


class BalanceCell(NamedTuple):
    """One setting of the sweep of balance, with the imbalance of each row."""

    trace: str
    ranks: int
    experts_per_rank: int
    replica_slots: int
    samples: int
    """The samples of a micro-batch."""
    imbalance: dict[str, float]
    """The load of the fullest rank over the mean, by row."""

    def gain(self, rival: str, own: str = JOINT, *, share: float = 1.0) -> float:
        """Return the speed of ``own`` over a rival, minus 1, if a share of the time waits for the fullest rank.

        Args:
            rival, own: rows.
            share: the share of a balanced run's time. With 1, the gain is the largest possible one.
        """
        mine, other = (1 + share * (self.imbalance[name] - 1) for name in (own, rival))
        return other / mine - 1


def sweep_balance(
    loads: Sequence[Loads],
    *,
    ranks: Sequence[int] = (16, 32, 64),
    slots: Sequence[int] = (1, 2),
    samples: Sequence[int] = SAMPLES,
    micro_batches: int = MICRO_BATCHES,
    rows: Mapping[str, Planner] = REPLICATION,
) -> Iterator[BalanceCell]:
    """Plan a batch in every setting whose experts divide over its ranks, and yield how uneven ranks remain.

    Args:
        loads: the loads, of which samples are drawn without replacement in a micro-batch.
        ranks: the numbers of ranks, in nodes of at most `RANKS_PER_NODE`.
        slots: the numbers of replica slots of a rank.
        samples: the numbers of samples of a micro-batch.
        micro_batches: M, the micro-batches of a batch.
        rows: the planners.
    """
    # Loads of one shape follow each other, so that programs are compiled once for them.
    for count, replica_slots, each in itertools.product(ranks, slots, loads):
        experts = each.counts.shape[-1]
        if experts % count:
            continue
        local = min(count, RANKS_PER_NODE)
        topology = Topology(
            num_nodes=count // local, ranks_per_node=local, num_experts=experts, replica_slots=replica_slots
        )
        for size in samples:
            rng = np.random.default_rng(0)
            drawn = [rng.choice(len(each.counts), size, replace=False) for _ in range(micro_batches)]
            load = np.stack([each.counts[indices].sum(0) for indices in drawn])
            imbalance = {name: float(_imbalance(load, planner, topology)) for name, planner in rows.items()}
            yield BalanceCell(each.name, count, experts // count, replica_slots, size, imbalance)


@functools.partial(jax.jit, static_argnames=("planner", "topology"))
def _imbalance(load: Int[Array, "M L E"], planner: Planner, topology: Topology) -> jax.Array:
    """Return the imbalance of a batch under a planner, all of whose tokens are on the first rank."""
    grid = (*load.shape[:2], topology.num_nodes, topology.ranks_per_node, load.shape[2])
    by_rank = jnp.zeros(grid, jnp.int32).at[:, :, 0, 0].set(jnp.asarray(load, jnp.int32))
    state = planner.init(topology, load.shape[1], key=jax.random.key(0))
    plan, _ = planner.update(PlanRequest(by_rank), state, topology)
    return batch_imbalance(rank_load(plan))


def waiting_share(model: str, *, context: int = 4096, experts_alone: bool = False) -> float:
    """Return the share of a modelled balanced run that waits for the fullest rank: experts, exchange and gathers.

    The run is on two nodes of `RANKS_PER_NODE` ranks, each with 16,384 tokens in a micro-batch.

    Args:
        model: a name in `relibra_jax.cost.models.MODELS`.
        context: the tokens of a sample.
        experts_alone: whether only the experts count, as if exchanges took as long for all plans.
    """
    sizes, tokens = MODELS[model], 16384
    topology = Topology(
        num_nodes=2, ranks_per_node=RANKS_PER_NODE, num_experts=sizes.num_experts, replica_slots=1
    )
    grid = (1, 1, topology.num_nodes, RANKS_PER_NODE, sizes.num_experts)
    load = np.full(grid, tokens * sizes.top_k // sizes.num_experts, np.int32)
    lengths = np.full(topology.num_ranks * tokens // context, context, np.int32)
    price = CostModel(cluster=CLUSTERS["h100"], model=sizes, striped=True).price(topology)
    time = balanced_time(load, lengths, topology, price)
    waits = time.compute if experts_alone else time.compute + time.exchange + time.gather
    return float(waits / time.total)


HOMES: Final[Mapping[str, PlannerEntry]] = {
    "LPT over ranks": PlannerEntry(
        planner=relibra(place=functools.partial(lpt_homes, nodes=False)), summary="as EPLB's global policy"
    ),
    "LPT over nodes": ablation()["place by lpt"],
    "annealed": ablation()["relibra"],
}
"""Homes by LPT, and annealed for compute and communication, as in the paper; all with ReLibra's replicas."""


class HomesCell(NamedTuple):
    """One setting of the sweep of homes, with the numbers of each row."""

    trace: str
    model: str
    nodes: int
    samples: int
    """The samples of a micro-batch."""
    imbalance: dict[str, float]
    """The load of the fullest rank over the mean."""
    crossings: dict[str, float]
    """Tokens that cross to other nodes, for each token."""
    seconds: dict[str, float]
    """Modelled seconds of a batch as exchanges run."""
    seconds_as_needed: dict[str, float]
    """The same if exchanges sent only needed rows."""

    def gain(self, *, as_needed: bool = False) -> float:
        """Return the modelled speed of annealed homes over the faster LPT, minus 1."""
        seconds = self.seconds_as_needed if as_needed else self.seconds
        return min(seconds[name] for name in seconds if name != "annealed") / seconds["annealed"] - 1


def sweep_homes(traces: Sequence[Trace]) -> Iterator[HomesCell]:
    """Plan and price batches in every setting; yield balance, crossings and modelled time of each row of `HOMES`.

    A setting is a number of nodes, a mean number of samples of a rank in a micro-batch, and a model that is priced.
    Each rank has one replica slot.

    Args:
        traces: the traces, of which batches are drawn with replacement.
    """
    micro_batches = 8
    # Settings that share shapes follow each other, so that programs are compiled once for them.
    for nodes, per_rank, trace, model in itertools.product(
        (2, 4), (1, 4), traces, (PAPER_MODELS[0], PAPER_MODELS[2])
    ):
        samples = per_rank * nodes * RANKS_PER_NODE
        setting = make_setting(
            trace,
            Ranks(nodes=nodes, ranks_per_node=RANKS_PER_NODE, replica_slots=1).topology(trace.num_experts),
            batching=Batching(batch_size=samples * micro_batches, bootstrap=2, micro_batches=micro_batches),
            cost=Costs(model=model, shards=10),
        )
        outcomes = {name: run_planner(name, entry, setting, timed_runs=0) for name, entry in HOMES.items()}
        numbers = {
            "imbalance": {name: each.imbalance for name, each in outcomes.items()},
            "crossings": {name: each.crossings for name, each in outcomes.items()},
            "seconds": {name: each.modelled_seconds for name, each in outcomes.items()},
            "seconds_as_needed": {
                name: each.balanced_seconds / each.share_as_needed for name, each in outcomes.items()
            },
        }
        yield HomesCell(trace.name, model, nodes, samples, **numbers)
