"""No plan is below the least-time bound: neither planners' plans, nor random ones, nor the optimum of tiny batches."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from support.costs import CLUSTER, MODEL, NEEDED
from support.plans import compiled_planner, random_plan, random_routing

from relibra_jax.contract.replay import expert_load
from relibra_jax.contract.types import BatchPlan, Price, RoutingReplay, Topology
from relibra_jax.cost.batch_time import batch_time
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.least_time import LeastTime, least_time
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.routing.striping import with_striped_load
from relibra_jax.routing.visits import node_visits

PATHS = ("flat", "hierarchical")
TOLERANCE = 1 + 1e-5  # modelled times are float32
EXPERTS, TOP_K = 8, 2


def topology(nodes=2, local=2, *, replicas=1, residents=0):
    return Topology(
        num_nodes=nodes,
        ranks_per_node=local,
        num_experts=EXPERTS,
        replica_slots=replicas,
        resident_slots=residents,
    )


def routed(seed, *, samples=16, layers=2, top_k=TOP_K, skew=1.2):
    rng = np.random.default_rng(seed)
    return random_routing(
        rng, samples=samples, tokens=12, layers=layers, experts=EXPERTS, top_k=top_k, skew=skew
    )


SHARED_LINK = dataclasses.replace(
    NEEDED,
    cluster=dataclasses.replace(CLUSTER, shared_link=True),
    model=dataclasses.replace(MODEL, vocabulary=30),
    scale=3.0,
    stretch=2.0,
    recompute=True,
)
AS_SENT = CostModel(cluster=CLUSTER, model=MODEL)
WAYS = {
    "striped": dataclasses.replace(AS_SENT, striped=True),
    "padded": dataclasses.replace(AS_SENT, exchange="padded", spare_room=False),
    "ragged": dataclasses.replace(AS_SENT, exchange="ragged"),
    "ragged, in pieces": dataclasses.replace(AS_SENT, exchange="ragged", pieces=2),
    "in pieces": dataclasses.replace(AS_SENT, pieces=3),
    "padded, in pieces": dataclasses.replace(AS_SENT, exchange="padded", pieces=2),
    "waits": dataclasses.replace(
        AS_SENT, striped=True, cluster=dataclasses.replace(CLUSTER, wait_seconds=0.1, choice_seconds=0.2)
    ),
    "two groups": dataclasses.replace(NEEDED, data_parallel=2),
}


def not_below(replay, batch_plan, where, *, across_nodes, cost_models=(NEEDED, AS_SENT)):
    """Compare the bound with the modelled time of a plan, on both paths, as needed and as sent."""
    lengths = replay.mask.sum(1)
    for path, cost_model in itertools.product(PATHS, cost_models):
        if cost_model.exchange == "ragged" and (path == "flat") != (where.num_nodes == 1):
            continue  # no layer runs it
        cost = dataclasses.replace(cost_model, path=path).price(where)
        dealt = with_striped_load(batch_plan, replay, where) if cost.striped else batch_plan
        visits = node_visits(replay, dealt, where, striped=cost.striped) if cost.hierarchical else None
        seconds = float(batch_time(dealt, lengths, where, cost, visits=visits).total)
        number = len(batch_plan.load) // cost.data_parallel
        bound = least_time(replay, where, cost=cost, across_nodes=across_nodes, micro_batches=number).total
        assert 0 < bound <= seconds * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "residents"),
    [
        ("static", 0),
        pytest.param("relibra", 0, marks=pytest.mark.long),
        pytest.param("relibra", 1, marks=pytest.mark.long),
        ("laer", 0),
    ],
)
def test_least_time_is_at_most_the_time_of_planners(name, residents):
    where, across = topology(residents=residents), PLANNERS[name].across_nodes
    for seed, skew in ((0, 0.0), (1, 2.0)):
        replay = routed(seed, skew=skew)
        assignment = assign_in_order(16, where, num_micro_batches=2)
        load = expert_load(replay, assignment, num_experts=EXPERTS)
        state = PLANNERS[name].planner.init(where, 2, key=jax.random.key(0))
        plan, _ = compiled_planner(name, where)(load, state)
        not_below(replay, BatchPlan(assignment, load, plan), where, across_nodes=across)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "residents", "across"),
    [pytest.param(4, 0, False, marks=pytest.mark.long), (2, 1, False), (2, 1, True), (1, 0, False)],
)
def test_least_time_is_at_most_the_time_of_random_plans(nodes, residents, across):
    where = topology(nodes, 4 // nodes, residents=residents)
    for seed in range(4):
        rng, replay = np.random.default_rng(seed), routed(seed)
        assignment = assign_in_order(16, where, num_micro_batches=2)
        load = np.asarray(expert_load(replay, assignment, num_experts=EXPERTS))
        plan = random_plan(rng, load, where, across_nodes=across)
        batch_plan, costs = BatchPlan(assignment, load, plan), (NEEDED, AS_SENT, SHARED_LINK)
        not_below(replay, batch_plan, where, across_nodes=across, cost_models=costs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.long] * (n > 1)) for n, way in enumerate(WAYS)]
)
def test_least_time_is_at_most_the_time_of_plans_however_layers_run(way):
    for seed, (nodes, residents, across) in enumerate([(2, 1, False), (4, 0, False), (1, 0, False)]):
        where, replay = topology(nodes, 4 // nodes, residents=residents), routed(seed)
        assignment = assign_in_order(16, where, num_micro_batches=2)
        load = np.asarray(expert_load(replay, assignment, num_experts=EXPERTS))
        plan = random_plan(np.random.default_rng(seed), load, where, across_nodes=across)
        not_below(
            replay, BatchPlan(assignment, load, plan), where, across_nodes=across, cost_models=[WAYS[way]]
        )


@pytest.mark.parametrize("path", PATHS)
def test_least_time_has_no_crossings_for_separable_samples(path):
    """Each half of the samples uses one half of the experts, so nothing crosses and the bound is reached."""
    ids = np.array([[[half, half + 1]] * 4 for half in (0, 2) for _ in range(4)], np.uint8)[:, :, None]
    replay = RoutingReplay(ids, np.ones(ids.shape[:2], bool))
    where = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=0)
    cost = Price(
        token=1.0,
        copy=1.0,
        crossing=5.0,
        spread=0.0,
        move=1.0,
        push=1.0,
        hierarchical=path == "hierarchical",
    )
    assert least_time(replay, where, cost=cost) == LeastTime(16.0, 32.0, pytest.approx(0.0, abs=1e-9))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("price", [0.01, 0.1, 1.0])
def test_least_time_allows_all_samples_in_one_node(path, price):
    """With cheap attention and compute, all samples may be on the node of the only experts that they use."""
    replay = RoutingReplay(np.full((8, 4, 1, 2), [0, 1], np.uint8), np.ones((8, 4), bool))
    where = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=0)
    cost = Price(
        token=price,
        copy=price,
        crossing=1.0,
        spread=0.0,
        move=0.0,
        push=0.0,
        hierarchical=path == "hierarchical",
    )
    assert least_time(replay, where, cost=cost).total <= 32 * price + 64 * price + 1e-9


@pytest.mark.parametrize("path", PATHS)
def test_least_time_attention_counts_squared_lengths_by_sample(path):
    """Squared lengths count by sample: half the tokens in one sample cost more than all in short ones."""
    cost = Price(token=0.0, pair=1.0, copy=0.0, crossing=0.0, spread=0.0, move=0.0, push=0.0)
    ids = np.zeros((2, 4, 1, 1), np.uint8)
    where = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    for mask, squares in (([[1, 1, 1, 1], [0, 0, 0, 0]], 16), ([[1, 1, 0, 0], [1, 1, 0, 0]], 8)):
        least = least_time(RoutingReplay(ids, np.array(mask, bool)), where, cost=cost)
        assert least.attention == squares / 2


@pytest.mark.parametrize("path", PATHS)
def test_least_time_sees_that_samples_share_the_homes_of_a_node(path):
    """Every sample could have its experts in its node, if other samples did not need other homes there."""
    rng, choices = np.random.default_rng(0), np.array(list(itertools.combinations(range(6), 3)))
    chosen = choices[rng.permutation(len(choices))]
    ids = np.repeat(chosen[:, None, None, :], 8, 1).astype(np.uint8)
    replay = RoutingReplay(ids, np.ones(ids.shape[:2], bool))
    where = Topology(num_nodes=2, ranks_per_node=1, num_experts=6, replica_slots=0)
    free = {"spread": 0.0, "move": 0.0, "push": 0.0, "hierarchical": path == "hierarchical"}
    cost = Price(token=1.0, copy=1.0, crossing=1.0, **free)
    seconds = least_time(replay, where, cost=cost)
    best = 80 + 240 + least_by_trying_homes(replay, path) / 2
    assert 80 + 240 + 40 < seconds.total <= best


def least_by_trying_homes(replay, path):
    """Return the fewest crossings if every sample is in the node with most of its experts."""
    uses = replay.expert_ids[:, :, 0, :, None] == np.arange(6)
    uses = uses.any(2).sum(1)  # [B E]
    home = np.array([[expert in half for expert in range(6)] for half in itertools.combinations(range(6), 3)])
    near = np.maximum(uses @ home.T, uses @ ~home.T)
    lost = 24 - near
    return (np.minimum(lost, 8) if path == "hierarchical" else lost).sum(0).min()


def test_least_time_of_a_batch_without_tokens_is_zero():
    replay = RoutingReplay(np.zeros((2, 3, 1, TOP_K), np.uint8), np.zeros((2, 3), bool))
    assert least_time(replay, topology(), cost=NEEDED.price(topology())) == LeastTime(0.0, 0.0, 0.0)


def test_least_time_rejects_a_negative_cost():
    cost = dataclasses.replace(NEEDED.price(topology()), crossing=-1.0)
    with pytest.raises(ValueError, match=r"crossing=-1.0 must be at least 0"):
        least_time(routed(0), topology(), cost=cost)


@functools.cache
def held_sets(nodes, experts, residents):
    """Enumerate the home nodes of experts, ``[ways, E]``, and the residents of nodes, ``[ways, N, E]``."""
    homes = np.array(sorted(set(itertools.permutations(np.repeat(np.arange(nodes), experts // nodes)))))
    one = np.eye(experts + 1, experts, dtype=bool)[[*range(experts * residents), experts]]
    extra = np.array(list(itertools.product(one, repeat=nodes)))
    ways = np.array(list(itertools.product(range(len(homes)), range(len(extra)))))
    return homes[ways[:, 0]], extra[ways[:, 1]]


def sent_and_computed(replay, layer, home, extra, *, hierarchical):
    """Return what a sample sends between nodes, ``[B N N]``, and what each node computes of it, ``[B N]``."""
    nodes = len(extra)
    uses = (replay.expert_ids[:, :, layer, :, None] == np.arange(len(home))).any(2)[:, None]  # [B 1 T E]
    uses = uses & replay.mask[:, None, :, None]
    at = np.where(extra, np.arange(nodes)[:, None], home)[..., None] == np.arange(nodes)  # [N E N]
    copies = np.einsum("bnte,nem->bntm", np.repeat(uses, nodes, 1).astype(int), at.astype(int))
    away = 1 - np.eye(nodes, dtype=int)
    sent = ((copies > 0) if hierarchical else copies).sum(2) * away
    return sent.astype(np.float32), copies.sum(2)[:, 0].astype(np.float32)


def least_by_trying(replay, nodes, experts, micro_batches, cost, *, residents=0):
    """Find the least seconds over all assignments, homes and residents, with one rank per node, in `Price`.

    A copy goes to the nearest slot. That is optimal if compute is free, so with residents compute must be free.
    """
    samples, _, layers, _ = replay.expert_ids.shape
    places = np.array(list(itertools.product(range(micro_batches * nodes), repeat=samples)))
    here = (places[:, None] == np.arange(micro_batches * nodes)[:, None]).astype(np.float32)
    here = here.reshape(len(places), micro_batches, nodes, samples)
    total = layers * cost.token * (here @ replay.mask.sum(1).astype(np.float32)).max(-1).sum(-1)
    for layer in range(layers):
        best = np.full(len(places), np.inf)
        for home, extra in zip(*held_sets(nodes, experts, residents), strict=True):
            sent, load = sent_and_computed(replay, layer, home, extra, hierarchical=cost.hierarchical)
            across = np.einsum("zmns,snt->zmnt", here, sent, optimize=True)
            busiest = np.maximum(across.sum(3), across.sum(2)).max(-1).sum(-1)
            computed = np.einsum("zmns,st->zmt", here, load, optimize=True).max(-1).sum(-1)
            pushes = (extra & (home != np.arange(nodes)[:, None])).sum(1).max()
            best = np.minimum(best, cost.crossing * busiest + cost.copy * computed + cost.push * pushes)
        total = total + best
    return float(total.min())


TINY = {
    "2 nodes": {"nodes": 2, "experts": 6, "micro_batches": 1, "samples": 8, "top_k": 2},
    "2 micro-batches": {"nodes": 2, "experts": 6, "micro_batches": 2, "samples": 5, "top_k": 3},
    "4 nodes": {"nodes": 4, "experts": 4, "micro_batches": 1, "samples": 5, "top_k": 2},
    "3 nodes, residents": {
        "nodes": 3,
        "experts": 3,
        "micro_batches": 1,
        "samples": 3,
        "top_k": 2,
        "residents": 1,
        "share": 0.3,
    },
    "residents": {"nodes": 2, "experts": 4, "micro_batches": 1, "samples": 6, "top_k": 2, "residents": 1},
}
PRICES = {
    "as on h100": {"token": 0.76, "copy": 0.44, "push": 3.0},
    "crossings alone": {"token": 0.02, "copy": 0.0, "push": 0.5},
}


@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", TINY)
def test_least_time_is_near_and_at_most_the_optimum_of_tiny_batches(name, path, prices):
    """The bound is at most the optimum and more than half of it (or its share); the test prints the mean ratio."""
    sizes = dict(TINY[name])
    share = sizes.pop("share", 0.5)
    nodes, experts, micro_batches = (sizes.pop(part) for part in ("nodes", "experts", "micro_batches"))
    residents = sizes.pop("residents", 0)
    costs = PRICES[prices] | ({"copy": 0.0} if residents else {})
    cost = Price(crossing=1.0, spread=0.0, move=0.0, hierarchical=path == "hierarchical", **costs)
    where = Topology(
        num_nodes=nodes, ranks_per_node=1, num_experts=experts, replica_slots=0, resident_slots=residents
    )
    shares = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        layers = 1 if residents else 2
        replay = random_routing(rng, tokens=10, layers=layers, experts=experts, skew=seed / 2, **sizes)
        best = least_by_trying(replay, nodes, experts, micro_batches, cost, residents=residents)
        bound = least_time(replay, where, cost=cost).total
        assert bound <= best * (1 + 1e-6)
        shares.append(bound / best)
    assert np.mean(shares) > share
    print(f"{name}, {path}, {prices}: {np.mean(shares):.0%} of the least time, at worst {min(shares):.0%}")
