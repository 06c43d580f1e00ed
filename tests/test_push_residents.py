"""Tests of pushed residents: exactly the weights of the plan, on any mesh, and the exact transpose for gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import load_of, random_ids, random_plan

from experiments.rl.balance import measure_push
from relibra_jax.contract.plan import home_layout, resident_experts
from relibra_jax.contract.types import EMPTY, Plan, Topology, layer_plans
from relibra_jax.execution import (
    ExpertParallel,
    Residents,
    check_residents,
    expert_mesh,
    push_residents,
    return_gradients,
)
from relibra_jax.routing.resident_push import PushSizes, push_counts
from relibra_jax.routing.sizes import count_capacities

LAYERS, EXPERTS, WIDTH, HIDDEN = 3, 16, 6, 5
MESHES = {"2x4": (2, 4), "4x2": (4, 2), "1x8": (1, 8), "8x1": (8, 1)}
RNG = np.random.default_rng(0)
WEIGHTS = RNG.normal(size=(LAYERS, EXPERTS, 3, WIDTH, HIDDEN)).astype(np.float32)


def topology_of(mesh, resident_slots=2):
    nodes, local = MESHES[mesh]
    return Topology(
        num_nodes=nodes,
        ranks_per_node=local,
        num_experts=EXPERTS,
        replica_slots=0,
        resident_slots=resident_slots,
    )


def random_residents(topology, seed, fill=0.7):
    """Return a plan of two micro-batches with random homes and residents."""
    rng = np.random.default_rng(seed)
    load = load_of(random_ids(rng, (2, LAYERS, topology.num_ranks, 4), EXPERTS, 2), topology)
    return random_plan(rng, load, topology, fill=fill), load


def expected(plan, topology):
    """Return the expected weights in every resident slot, with zeros in empty slots."""
    resident = np.asarray(resident_experts(plan, topology))
    layer = np.arange(LAYERS).reshape(-1, 1, 1, 1)
    return np.where((resident == EMPTY)[..., None, None, None], 0, WEIGHTS[layer, resident])


def at_home(plan, topology):
    return np.stack([WEIGHTS[layer][row] for layer, row in enumerate(home_layout(plan.home, topology))])


@functools.cache
def compiled(mesh, resident_slots=2, **options):
    """Return the jitted push of residents and return of their gradients, on a mesh."""
    topology = topology_of(mesh, resident_slots)
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology)

    @jax.jit
    def both(experts, gradients, plan):
        pushed = push_residents(experts, plan, parallel, **options).weights
        nothing = jnp.zeros_like(experts)
        return pushed, return_gradients(gradients, nothing, plan, parallel, **options)

    return both


def check(mesh, plan, **options):
    topology = topology_of(mesh)
    experts = at_home(plan, topology)
    desired = expected(plan, topology)
    gradients = RNG.normal(size=desired.shape).astype(np.float32)
    pushed, returned = compiled(mesh, **options)(experts, gradients, plan)
    np.testing.assert_array_equal(pushed, desired)
    # Add the gradient of each slot to that of its expert.
    total = np.zeros_like(WEIGHTS, np.float64)
    resident = np.asarray(resident_experts(plan, topology))
    for place in zip(*np.nonzero(resident != EMPTY), strict=True):
        total[place[0], resident[place]] += gradients[place]
    desired = np.stack([total[layer][row] for layer, row in enumerate(home_layout(plan.home, topology))])
    np.testing.assert_allclose(returned, desired, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", MESHES)
def test_push_residents_fills_slots_and_returns_gradients(mesh):
    for seed in range(3):
        check(mesh, random_residents(topology_of(mesh), seed)[0])


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 1.0]))
def test_push_residents_works_for_any_plan(seed, fill):
    check("2x4", random_residents(topology_of("2x4"), seed, fill)[0])


def test_push_residents_is_the_same_in_chunks():
    """Rows of 5 columns go in chunks of 2, 2 and 1."""
    check("2x4", random_residents(topology_of("2x4"), 0)[0], chunk_bytes=LAYERS * 2 * 3 * WIDTH * 2 * 4)


def test_return_gradients_is_the_transpose_of_the_push():
    topology = topology_of("2x4")
    plan, _ = random_residents(topology, 1)
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology)
    experts = at_home(plan, topology)
    gradients = RNG.normal(size=expected(plan, topology).shape).astype(np.float32)

    def push(experts):
        return push_residents(experts, plan, parallel).weights

    desired = jax.jit(lambda experts, gradients: jax.vjp(push, experts)[1](gradients)[0])(experts, gradients)
    actual = compiled("2x4")(experts, gradients, plan)[1]
    np.testing.assert_array_equal(actual, desired)


def test_push_residents_takes_stacked_and_single_layers():
    topology = topology_of("2x4")
    plan, _ = random_residents(topology, 2)
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology)
    experts = at_home(plan, topology)
    parts = {"first": experts[0], "others": experts[1:]}
    pushed = jax.jit(lambda parts: push_residents(parts, plan, parallel).weights)(parts)
    np.testing.assert_array_equal(pushed, expected(plan, topology))
    returned = jax.jit(lambda pushed, parts: return_gradients(pushed, parts, plan, parallel))(pushed, parts)
    assert jax.tree.map(np.shape, returned) == jax.tree.map(np.shape, parts)
    whole = experts + compiled("2x4")(experts, pushed, plan)[1]
    np.testing.assert_array_equal(np.concatenate([returned["first"][None], returned["others"]]), whole)


@pytest.mark.slow
def test_push_residents_runs_over_data_and_fsdp_axes():
    """Over the axis data every copy has separate residents, whose gradients are summed when they return.

    Over fsdp, residents are sharded like homes.
    """
    topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=EXPERTS, replica_slots=0, resident_slots=2)
    mesh = expert_mesh(topology, data=2, fsdp=2)
    parallel = ExpertParallel(mesh=mesh, topology=topology)
    plan, _ = random_residents(topology, 3)
    spec = jax.P(None, "node", "local", None, None, "fsdp")
    experts = jax.device_put(at_home(plan, topology), jax.NamedSharding(mesh, spec))
    options = {"fsdp_axis": "fsdp"}
    pushed = jax.jit(lambda experts: push_residents(experts, plan, parallel, **options).weights)(experts)
    desired = expected(plan, topology)
    assert pushed.shape == (LAYERS, 2, 1, 2, 1, 2, 3, WIDTH, HIDDEN)
    assert pushed.addressable_shards[0].data.shape == (LAYERS, 1, 1, 1, 1, 2, 3, WIDTH // 2, HIDDEN)
    np.testing.assert_array_equal(pushed, np.broadcast_to(desired[:, None, None], pushed.shape))

    gradients = RNG.normal(size=pushed.shape).astype(np.float32)
    nothing = jnp.zeros_like(experts)
    way_back = jax.jit(lambda gradients: return_gradients(gradients, nothing, plan, parallel, **options))
    returned = way_back(gradients)
    assert returned.sharding.is_equivalent_to(experts.sharding, returned.ndim)
    alone = Topology(num_nodes=2, ranks_per_node=1, num_experts=EXPERTS, replica_slots=0, resident_slots=2)
    single = ExpertParallel(mesh=expert_mesh(alone, devices=jax.devices()[:2]), topology=alone)
    of_sum = jax.jit(lambda gradients: return_gradients(gradients, np.asarray(nothing), plan, single))
    np.testing.assert_allclose(returned, of_sum(gradients.sum((1, 2))), rtol=1e-5, atol=1e-6)


def test_push_residents_sends_the_dtype_of_the_computation():
    topology = topology_of("2x4")
    plan, _ = random_residents(topology, 4)
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology)
    push = jax.jit(lambda experts: push_residents(experts, plan, parallel, dtype=jnp.bfloat16).weights)
    pushed = push(at_home(plan, topology))
    np.testing.assert_array_equal(pushed, expected(plan, topology).astype(jnp.bfloat16))


@pytest.mark.parametrize("mesh", ["2x4", "4x2"])
def test_push_residents_crosses_once_for_each_node(mesh):
    """Crossings equal a plain count: one per expert and node, however many ranks of the node hold the expert."""
    topology = topology_of(mesh)
    plan, load = random_residents(topology, 5, fill=1.0)
    resident, homes = np.asarray(resident_experts(plan, topology)), topology.home_slots
    pairs, exports = np.zeros((topology.num_nodes,) * 2, int), np.zeros(topology.num_ranks, int)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            owner = plan.home[layer, expert] // homes
            needing = {node for node, *_ in np.argwhere(resident[layer] == expert)}
            exports[owner] += bool(needing)
            for node in needing:
                pairs[owner // topology.ranks_per_node, node] += 1
    actual = push_counts(plan.home, resident, topology)
    np.testing.assert_array_equal(actual[0], exports)
    np.testing.assert_array_equal(actual[1], pairs)
    own = np.eye(topology.num_nodes, dtype=bool)
    most = {"exports": exports.max(), "pair": pairs[~own].max(), "own": pairs[own].max()}
    sizes = PushSizes(**{name: int(size) for name, size in most.items()})
    assert count_capacities(layer_plans(plan, load), topology).push == sizes


def test_push_residents_sends_an_expert_from_its_rank_once():
    """If expert 0 is a resident on every other node, its rank exports it once, and one crosses to each node."""
    topology = topology_of("8x1", resident_slots=1)
    resident = np.full((1, 8, 1, 1), EMPTY)
    resident[0, 1:] = 0
    exports, pairs = push_counts(np.arange(EXPERTS)[None], resident, topology)
    assert exports.tolist() == [1] + [0] * 7
    assert pairs[0].tolist() == [0] + [1] * 7
    slots = np.pad(resident, ((0, 0), (0, 0), (0, 0), (2, 0)))  # home slots are not read
    plan = Plan(slots[None], np.arange(EXPERTS)[None], slots[None])
    busiest = {"balance/pushed_by_busiest_rank": 1, "balance/pushed_across_by_busiest_rank": 7.0}
    assert measure_push(plan, topology) == busiest


@pytest.mark.parametrize("small", [None, "exports", "pair", "own"])
def test_push_residents_is_nan_in_too_small_buffers(small):
    """Counted sizes are exact: with room for one expert less, the result is NaN."""
    topology = topology_of("2x4")
    plan, load = random_residents(topology, 7)
    capacities = count_capacities(layer_plans(plan, load), topology)
    if small is not None:
        less = getattr(capacities.push, small) - 1
        push = dataclasses.replace(capacities.push, **{small: less})
        capacities = dataclasses.replace(capacities, push=push)
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology, capacities=capacities)
    pushed = jax.jit(lambda experts: push_residents(experts, plan, parallel).weights)(at_home(plan, topology))
    if small is None:
        np.testing.assert_array_equal(pushed, expected(plan, topology))
    else:
        assert np.isnan(pushed).all()


def test_push_residents_of_no_residents_sends_nothing():
    """Planners without residents leave resident slots empty, and the counted buffers hold no expert."""
    topology = topology_of("2x4")
    plan, load = random_residents(topology, 7, fill=0.0)
    capacities = count_capacities(layer_plans(plan, load), topology)
    assert capacities.push == PushSizes(exports=0, pair=0, own=0)
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology, capacities=capacities)
    experts = at_home(plan, topology)
    pushed = jax.jit(lambda experts: push_residents(experts, plan, parallel).weights)(experts)
    np.testing.assert_array_equal(pushed, expected(plan, topology))
    assert not np.any(pushed)
    returned = jax.jit(lambda *gradients: return_gradients(*gradients, plan, parallel))(pushed, experts)
    np.testing.assert_array_equal(returned, experts)
    # Such buffers are too small for a plan with residents.
    other, _ = random_residents(topology, 7)
    pushed = jax.jit(lambda experts: push_residents(experts, other, parallel).weights)(
        at_home(other, topology)
    )
    assert np.isnan(pushed).all()


def test_check_residents_rejects_outdated_residents():
    topology = topology_of("2x4")
    plan, other = (random_residents(topology, seed)[0] for seed in (0, 1))
    experts = np.asarray(resident_experts(plan, topology))
    residents = Residents(expected(plan, topology), experts, np.asarray(3, np.int32))
    check_residents(residents, jnp.asarray(3), plan, topology)
    with pytest.raises(ValueError, match="pushed at optimizer step 3, but the optimizer is at step 4: push"):
        check_residents(residents, 4, plan, topology)
    with pytest.raises(
        ValueError, match=r"layer 0, node 0, .*: has expert -?\d+, but the plan has -?\d+: push"
    ):
        check_residents(residents, 3, other, topology)
    with pytest.raises(ValueError, match="do not say when they were pushed: push them with step="):
        check_residents(residents._replace(step=None), 3, plan, topology)
    with pytest.raises(ValueError, match=r"take those of a step with residents\.at\(step\) first"):
        residents.layer(0)
    assert (np.asarray(residents.at(4).layer(0).experts) < EMPTY).all()
    np.testing.assert_array_equal(residents.at(3).layer(1).experts, experts[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topology": topology_of("2x4", 0)}, "resident_slots=0: there are no residents to push"),
        ({"layers": 2}, "experts has 2 layers, but plan has 3"),
        ({"slots": 1}, r"experts: expected shape \(3, 2, 4, 2, .*found \(3, 2, 4, 1"),
    ],
)
def test_push_residents_rejects_what_cannot_be_pushed(change, message):
    topology = topology_of("2x4")
    plan, _ = random_residents(topology, 8)
    experts = at_home(plan, topology)[: change.get("layers", LAYERS), :, :, : change.get("slots", 2)]
    topology = change.get("topology", topology)
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology)
    with pytest.raises(ValueError, match=message):
        push_residents(experts, plan, parallel)
