"""Training with a new plan and a reorder in every batch gives the same parameters as training without them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from support.dense import mixture
from support.layer import run_layer
from support.plans import load_of

from relibra_jax.contract.plan import home_layout
from relibra_jax.contract.planner import PlanRequest
from relibra_jax.contract.types import Topology, layer_plans
from relibra_jax.execution import (
    ExpertParallel,
    expert_mesh,
    migrate_experts,
    optimizer_layers,
    rank_sharding,
)
from relibra_jax.execution.checkpoint import restore_checkpoint, save_checkpoint
from relibra_jax.planning.planners import PLANNERS

STEPS, LAYERS, SAMPLES, TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 10, 2, 8, 6, 6, 5, 8, 2
HALF = STEPS // 2
OPTIMIZER = optax.adamw(3e-3)
EVERY_LAYER = [{"experts": layer, "router": None} for layer in range(LAYERS)]
# The largest allowed difference of a parameter after all steps in float64: sums have a different order, and small
# moments divide them.
TOLERANCE = 1e-9


@functools.cache
def data():
    """Return inputs, targets and routing of all batches, ``[STEPS, SAMPLES, ...]``, each with different hot experts."""
    rng = np.random.default_rng(0)
    shape = (STEPS, SAMPLES, TOKENS)
    popular = rng.normal(size=(STEPS, 1, 1, LAYERS, EXPERTS)) * 1.5
    scores = popular + rng.gumbel(size=(*shape, LAYERS, EXPERTS))
    ids = np.argsort(-scores, -1)[..., :TOP_K].astype(np.int32)
    return rng.normal(size=(*shape, WIDTH)), rng.normal(size=(*shape, WIDTH)), ids


def initial():
    rng = np.random.default_rng(1)
    return [
        {
            "experts": rng.normal(size=(EXPERTS, 3, WIDTH, HIDDEN)) * 0.4,
            "router": rng.normal(size=(WIDTH, EXPERTS)) * 0.4,
        }
        for _ in range(LAYERS)
    ]


def mean_square(params, x, target, ids, experts_of):
    """Compute the loss of a residual stack; ``experts_of(layer, x, ids, gates)`` is its mixture of experts."""
    for layer, weights in enumerate(params):
        chance = jax.nn.softmax(x @ weights["router"])
        gates = jnp.take_along_axis(chance, ids[..., layer, :], -1)
        x = x + experts_of(layer, x, ids[..., layer, :], gates)
    return ((x - target) ** 2).mean()


def update(loss, params, opt_state):
    grads = jax.grad(loss)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@functools.cache
def train_dense():
    """Train with all experts on one device, and return the parameters after every step."""

    @jax.jit
    def step(params, opt_state, x, target, ids):
        def experts_of(layer, x, ids, gates):
            return mixture(x, ids, gates, params_now[layer]["experts"])

        def loss(params):
            nonlocal params_now
            params_now = params
            return mean_square(params, x, target, ids, experts_of)

        params_now = params
        return update(loss, params, opt_state)

    params = jax.tree.map(jnp.asarray, initial())
    opt_state, history = OPTIMIZER.init(params), []
    for batch in zip(*data(), strict=True):
        params, opt_state = step(params, opt_state, *batch)
        history.append(jax.tree.map(np.asarray, params))
    return history


@functools.cache
def compiled_step(topology, mesh):
    """Return the jitted update of a run."""
    parallel = ExpertParallel(mesh=mesh, topology=topology, path="hierarchical")

    @jax.jit
    def step(params, opt_state, x, target, ids, plans):
        def loss(params):
            def experts_of(layer, x, ids, gates):
                return run_layer(x, ids, gates, params[layer]["experts"], plans.layer(layer), parallel)

            return mean_square(params, x, target, ids, experts_of)

        return update(loss, params, opt_state)

    return step


class Run:
    """A training run on a mesh of ranks. If ``planner`` is None, experts never move."""

    def __init__(self, nodes, local, planner="relibra"):
        self.topology = Topology(num_nodes=nodes, ranks_per_node=local, num_experts=EXPERTS, replica_slots=1)
        self.mesh = expert_mesh(self.topology, devices=jax.devices()[: nodes * local])
        self.planner = PLANNERS[planner].planner
        self.plan = jax.jit(self.planner.update)
        with jax.enable_x64(False):
            self.state = self.planner.init(self.topology, LAYERS, key=jax.random.key(0))
        self.home = np.tile(np.arange(EXPERTS), (LAYERS, 1))
        by_rank, everywhere = rank_sharding(self.mesh), jax.NamedSharding(self.mesh, jax.P())
        self.params = [
            {
                "experts": self.put(weights["experts"][home_layout(home, self.topology)], by_rank),
                "router": self.put(weights["router"], everywhere),
            }
            for weights, home in zip(initial(), self.home, strict=True)
        ]
        self.opt_state = OPTIMIZER.init(self.params)
        self.opt_state = jax.tree.map(
            lambda leaf: self.put(np.asarray(leaf), everywhere) if leaf.ndim < 4 else leaf, self.opt_state
        )
        self.step = compiled_step(self.topology, self.mesh)

    def put(self, values, sharding):
        values = np.asarray(values)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    def get(self, array):
        """Copy a whole array to this host, with one process or several."""
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))

    @property
    def layers(self):
        """Return the labels of the expert leaves."""
        return {
            "params": EVERY_LAYER,
            "opt_state": optimizer_layers(OPTIMIZER, self.opt_state, EVERY_LAYER),
        }

    def train(self, first, last):
        """Plan, reorder and update for the batches ``first`` to ``last``."""
        for x, target, ids in list(zip(*data(), strict=True))[first:last]:
            by_layer = np.moveaxis(ids, 2, 0).reshape(1, LAYERS, self.topology.num_ranks, -1, TOP_K)
            load = load_of(by_layer, self.topology)
            with jax.enable_x64(False):
                plan, self.state = self.plan(PlanRequest(load), self.state, self.topology)
            plan = jax.tree.map(np.asarray, plan)
            self.reorder(plan.home)
            plans = layer_plans(plan, load).layer(0)
            self.params, self.opt_state = self.step(self.params, self.opt_state, x, target, ids, plans)

    def reorder(self, home):
        tree = {"params": self.params, "opt_state": self.opt_state}
        moved = migrate_experts(
            tree, self.home, home, layers=self.layers, mesh=self.mesh, topology=self.topology
        )
        self.params, self.opt_state, self.home = moved["params"], moved["opt_state"], home

    def logical(self):
        """Return the parameters on the host, with experts in logical order."""
        return [
            {
                "experts": self.get(weights["experts"]).reshape(EXPERTS, 3, WIDTH, HIDDEN)[home],
                "router": self.get(weights["router"]),
            }
            for weights, home in zip(self.params, self.home, strict=True)
        ]

    def save(self, directory, step):
        tree = {"params": self.params, "opt_state": self.opt_state, "planner": self.state}
        with ocp.CheckpointManager(directory) as manager:
            save_checkpoint(
                manager,
                step,
                tree,
                self.home,
                layers=self.layers | {"planner": None},
                mesh=self.mesh,
                topology=self.topology,
            )
            manager.wait_until_finished()

    def restore(self, directory):
        like = {"params": self.params, "opt_state": self.opt_state, "planner": self.state}
        with ocp.CheckpointManager(directory) as manager:
            restored = restore_checkpoint(
                manager,
                like,
                layers=self.layers | {"planner": None},
                mesh=self.mesh,
                topology=self.topology,
            )
        self.params, self.opt_state = restored.tree["params"], restored.tree["opt_state"]
        self.state, self.home = restored.tree["planner"], restored.home
        return restored.step


def largest_difference(actual, expected):
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(np.abs(a - b).max() for a, b in pairs)


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def whole():
    """Make an uninterrupted run on 2x4."""
    with jax.enable_x64(True):
        run = Run(2, 4)
        homes = [run.home]
        for step in range(STEPS):
            run.train(step, step + 1)
            homes.append(run.home)
        return run, homes


@pytest.mark.slow
def test_training_with_plans_and_reorders_is_the_same(whole):
    run, homes = whole
    moved = [(now != before).any() for before, now in itertools.pairwise(homes)]
    assert sum(moved) > STEPS / 2
    assert largest_difference(train_dense()[-1], initial()) > 0.01
    assert largest_difference(run.logical(), train_dense()[-1]) < TOLERANCE


@pytest.mark.slow
def test_training_under_static_is_the_same(whole):
    still = Run(2, 4, "static")
    still.train(0, STEPS)
    assert largest_difference(still.logical(), whole[0].logical()) < TOLERANCE


@pytest.mark.slow
def test_training_resumed_gives_the_same_bits(whole, tmp_path):
    first, second = Run(2, 4), Run(2, 4)
    first.train(0, HALF)
    first.save(tmp_path, HALF)
    assert second.restore(tmp_path) == HALF
    np.testing.assert_array_equal(second.home, first.home)
    second.train(HALF, STEPS)
    assert largest_difference(second.logical(), whole[0].logical()) == 0


@pytest.mark.slow
def test_training_resumed_on_fewer_ranks_is_the_same(whole, tmp_path):
    first, second = Run(2, 4), Run(1, 4)
    first.train(0, HALF)
    first.save(tmp_path, HALF)
    planner = second.state
    # The saved planner state has a different topology; it is restored but not used.
    second.state = first.state
    assert second.restore(tmp_path) == HALF
    second.state = planner
    second.train(HALF, STEPS)
    assert largest_difference(second.logical(), whole[0].logical()) < TOLERANCE
