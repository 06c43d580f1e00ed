"""Routes stay with the process that has their samples: plans, buffers and layers are those of the whole replay.

Here one process has all samples, in another order than the batch, so that its rows go the way that rows of several
processes go. Runs of two processes are in test_rl_processes.py.
"""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from support.costs import CLUSTER, MODEL
from support.plans import random_planner, random_routing

from relibra_jax.contract.types import RoutingReplay, Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.execution.gating import GATINGS
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.nnx import Balancer, MoELayer, expert_mesh
from relibra_jax.nnx.batch_routes import BatchRoutes
from relibra_jax.planning.baselines.eplb import eplb
from relibra_jax.planning.batch import count_batch
from relibra_jax.planning.replication import without_replicas
from relibra_jax.routing.pieces import dispatched_load
from relibra_jax.routing.sequence_packing import SequenceLayout
from relibra_jax.routing.striping import with_striped_load
from relibra_jax.routing.visits import node_visits, possible_visits

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1, resident_slots=1)
LAYERS, SAMPLES, TOKENS, TOP_K = 2, 13, 6, 2
GATING = dataclasses.replace(GATINGS["qwen3-moe"], top_k=TOP_K)
EPLB = eplb()


class Layers(nnx.Module):
    """The experts of two layers, which are only moved."""

    def __init__(self, mesh):
        make = functools.partial(MoELayer, TOPOLOGY, 4, 4, GATING, rngs=nnx.Rngs(0), mesh=mesh)
        self.layers = nnx.List([make() for _ in range(LAYERS)])


@pytest.fixture(scope="module")
def replay():
    sizes = {"samples": SAMPLES, "tokens": TOKENS, "layers": LAYERS, "experts": 8, "top_k": TOP_K}
    return random_routing(np.random.default_rng(0), **sizes)


@pytest.fixture(scope="module")
def own():
    return np.random.default_rng(1).permutation(SAMPLES)


def prepare(replay, *, sequences, data=1, own=None, **options):
    mesh = expert_mesh(TOPOLOGY, devices=jax.devices()[: 4 * data], data=data)
    parallel = ExpertParallel(mesh=mesh, topology=TOPOLOGY, **options)
    balancer = Balancer(
        random_planner(),
        parallel,
        num_layers=LAYERS,
        num_micro_batches=2,
        key=jax.random.key(0),
        assign=None,
        cost="balance",
        sequences=sequences,
    )
    return balancer.prepare(Layers(mesh), None, replay, own=own)


def part(replay, own):
    """Return the routes of some samples, in this order."""
    return RoutingReplay(*(np.asarray(leaf)[own] for leaf in replay))


WAYS = {
    "padded": {"sequences": "padded", "striped": False},
    "packed": {"sequences": "packed", "striped": False, "data": 2},
    "packed, striped": {"sequences": "packed", "striped": True, "exchange": "padded"},
    "split, in pieces": {"sequences": "split", "striped": True, "pieces": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_from_own_routes_is_that_of_the_whole_replay(way, replay, own):
    whole = prepare(replay, **WAYS[way])
    mine = prepare(part(replay, own), own=own, **WAYS[way])
    chex.assert_trees_all_equal(jax.device_get(mine.batch_plan), jax.device_get(whole.batch_plan))
    assert (mine.visits >= whole.visits).all()
    assert mine.visits.sum() <= 1.1 * whole.visits.sum()
    bound, exact = mine.parallel.capacities, whole.parallel.capacities
    assert dataclasses.replace(bound.node, lengths=exact.node.lengths) == exact.node
    assert bound.node.lengths[-1] >= exact.node.lengths[-1], "own routes bound visits from above"
    assert dataclasses.replace(bound, node=exact.node) == exact
    chex.assert_trees_all_equal(jax.device_get(mine.layers()), jax.device_get(whole.layers()))
    values = np.random.default_rng(2).normal(size=(SAMPLES, TOKENS, 3)).astype(np.float32)
    tree = {"ids": replay.expert_ids, "mask": replay.mask, "values": values, "number": np.arange(SAMPLES)}
    on_ranks = whole.to_ranks(tree)
    own_rows = jax.tree.map(lambda leaf: np.asarray(leaf)[own], tree)
    chex.assert_trees_all_equal(mine.to_ranks(own_rows, own=own), on_ranks)
    every = whole.from_ranks(on_ranks)
    chex.assert_trees_all_equal(
        mine.from_ranks(on_ranks, own=own), jax.tree.map(lambda leaf: leaf[own], every)
    )


def test_counts_of_own_routes_are_those_of_the_whole_replay(replay, own):
    price = CostModel(cluster=CLUSTER, model=MODEL, scale=1.0).price(TOPOLOGY)
    planner = EPLB._replace(uses_transitions=True)
    counted = BatchRoutes(part(replay, own), own).count(planner, TOPOLOGY, [price])
    chex.assert_trees_all_equal(counted, count_batch(replay, TOPOLOGY, with_transitions=True))


def test_possible_visits_are_exact_where_ranks_send_an_expert_to_one_node(replay):
    batch = prepare(replay, sequences="padded", striped=False)
    plan = jax.device_get(batch.batch_plan)
    at_home = without_replicas(plan.load.sum((2, 3)), plan.plan.home, TOPOLOGY)
    for striped in (False, True):
        loaded = plan._replace(plan=at_home)
        loaded = with_striped_load(loaded, replay, TOPOLOGY) if striped else loaded
        np.testing.assert_array_equal(
            possible_visits(replay, loaded, TOPOLOGY, striped=striped),
            node_visits(replay, loaded, TOPOLOGY, striped=striped),
        )


@pytest.mark.parametrize("layout", [None, "split"])
def test_a_process_may_have_no_sample_of_a_stage(layout, replay):
    whole = prepare(replay, **WAYS["split, in pieces" if layout else "padded"])
    plan, sequences = jax.device_get(whole.batch_plan), whole.host.sequences
    laid_out = None
    if layout:
        shape = (*plan.assignment.sample.shape[:3], 1, -1)
        laid_out = SequenceLayout(sequences.samples.reshape(shape), sequences.positions.reshape(shape))
    nothing = BatchRoutes(part(replay, np.arange(0)), np.arange(0))
    placed, of_none = nothing.placed(plan, laid_out)
    load = dispatched_load(placed, of_none.assignment, TOPOLOGY, striped=layout is not None)
    assert load.shape == plan.load.shape
    assert not np.asarray(load).any()
    assert not possible_visits(placed, of_none, TOPOLOGY).any()


def test_own_routes_that_are_wrong_are_named(replay, own):
    with pytest.raises(ValueError, match=r"own: sample 0 of 13 is with 2 processes, not with one"):
        prepare(part(replay, own), own=np.where(own == 12, 0, own), sequences="padded")
    with pytest.raises(
        ValueError, match=r"own: expected integers \[13\], one for each sample of the replay, not int"
    ):
        prepare(replay, own=own[1:], sequences="padded")
    with pytest.raises(
        ValueError, match=r"own: samples 0..20 must be in 0..12: the processes have 13 samples"
    ):
        prepare(replay, own=np.where(own == 12, 20, own), sequences="padded")
    with pytest.raises(ValueError, match="own names the samples of a replay, and there is none"):
        prepare(None, own=own, sequences="padded")
    with pytest.raises(ValueError, match=r"samples\['x'\]: shape \(3,\), but own names 13 samples"):
        prepare(replay, sequences="padded").to_ranks({"x": np.zeros(3)}, own=own)
