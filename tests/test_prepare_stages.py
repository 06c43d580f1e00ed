"""Tests of Balancer.prepare_stages: a recompute of all samples, and updates from parts of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from support.plans import random_planner, random_routing

from relibra_jax import Stage, Topology, static
from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.types import EMPTY
from relibra_jax.execution import check_residents, expert_mesh
from relibra_jax.execution.gating import GATINGS
from relibra_jax.nnx import (
    Balancer,
    ExpertParallel,
    MoELayer,
    accumulate_gradients,
    check_executed,
    get_homes,
    prepare_residents,
    restore_training,
    save_training,
)

LAYERS, SAMPLES, TOKENS, WIDTH, HIDDEN, EXPERTS, BATCHES = 2, 16, 4, 6, 5, 8, 2
TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=EXPERTS, replica_slots=1, resident_slots=2)
PLAIN = Topology(num_nodes=2, ranks_per_node=2, num_experts=EXPERTS, replica_slots=0)
PARTS = (range(8), range(8, 16))
STAGES = (Stage(1), *(Stage(2, part) for part in PARTS))
"""A recompute of all samples in one micro-batch, then two updates of half of them in two."""
OPTIMIZER, PLANNER, PUSH = optax.adamw(1e-2, eps=1e-3), random_planner(), nnx.jit(prepare_residents)
TRACES = []


@functools.cache
def data():
    rng = np.random.default_rng(0)
    sizes = {"samples": SAMPLES, "tokens": TOKENS, "layers": LAYERS, "experts": EXPERTS, "top_k": 2}
    inputs = [rng.normal(size=(SAMPLES, TOKENS, WIDTH)).astype(np.float32) for _ in range(BATCHES)]
    return [(x, random_routing(rng, **sizes)) for x in inputs]


class Model(nnx.Module):
    """A residual stack of mixture-of-experts layers."""

    def __init__(self, topology, mesh):
        gating, options = GATINGS["qwen3-moe"], {"mesh": mesh, "rngs": nnx.Rngs(0)}
        gating = gating.__class__(**(vars(gating) | {"top_k": 2}))
        self.layers = nnx.List([MoELayer(topology, WIDTH, HIDDEN, gating, **options) for _ in range(LAYERS)])

    def __call__(self, x, replay, layers, parallel):
        rows = []
        for number, moe in enumerate(self.layers):
            moe_output = moe(
                *(x, replay.expert_ids[..., number, :], layers.layer(number)),
                parallel=parallel,
                mask=replay.mask,
            )
            x = x + moe_output.output
            rows.append(moe_output.slot_rows)
        return x, jnp.stack(rows)


@nnx.jit
def forward(model, batch, sequences, residents):
    """Return the output of every token, and the rows of the slots."""
    graph, state = nnx.split(model)

    def one(_, micro_batch):
        (x, replay), layers = micro_batch
        if residents is not None:
            layers = layers._replace(residents=residents._replace(step=None))
        return None, nnx.merge(graph, state)(x, replay, layers, batch.parallel)

    return jax.lax.scan(one, None, (sequences, batch.layers()))[1]


@nnx.jit
def train_step(model, optimizer, batch, sequences, weight, residents):
    TRACES.append(batch.parallel.capacities)

    def objective(model, sequences, layers):
        (x, replay), weight = sequences
        out, slot_rows = model(x, replay, layers, batch.parallel)
        loss = (jnp.square(out - 1).sum(-1) * weight).sum()
        return loss, (loss, slot_rows)

    gradients, (losses, slot_rows) = accumulate_gradients(
        model, objective, batch, (sequences, weight), residents=residents, step=optimizer.step[...]
    )
    optimizer.update(model, gradients)
    return losses.sum(), slot_rows


class Run:
    """A model, its optimizer and its balancer."""

    def __init__(self, planner=PLANNER, topology=TOPOLOGY, **axes):
        devices = topology.num_ranks * int(np.prod(list(axes.values())))
        mesh = expert_mesh(topology, devices=jax.devices()[:devices], **axes)
        self.model = Model(topology, mesh)
        self.optimizer = nnx.Optimizer(self.model, OPTIMIZER, wrt=nnx.Param)
        self.balancer = Balancer(
            planner,
            ExpertParallel(mesh=mesh, topology=topology, check_rows=True),
            num_layers=LAYERS,
            num_micro_batches=2,
            key=jax.random.key(0),
            assign=None,
        )

    def prepare(self, number=0, stages=STAGES):
        return self.balancer.prepare_stages(self.model, self.optimizer, data()[number][1], stages)

    def update(self, batch, number, part, residents=None):
        """Run one update and return its loss, the mean over its own tokens."""
        mask = data()[number][1].mask
        own = np.isin(np.arange(SAMPLES), part)[:, None] & mask
        sequences, weight = batch.to_ranks((data()[number], (own / own.sum()).astype(np.float32)))
        loss, slot_rows = train_step(self.model, self.optimizer, batch, sequences, weight, residents)
        check_executed(slot_rows, batch)
        return float(loss)

    def train(self, first, last):
        """Run all stages; return the outputs of the recompute and the losses of the updates.

        The first update shares the recompute's residents.
        """
        seen, losses = [], []
        for number in range(first, last):
            recompute, *updates = self.prepare(number)
            residents = PUSH(self.model, self.optimizer, recompute)
            out, slot_rows = forward(self.model, recompute, recompute.to_ranks(data()[number]), residents)
            check_executed(slot_rows, recompute)
            seen.append(recompute.from_ranks(out) * data()[number][1].mask[..., None])
            for batch, part in zip(updates, PARTS, strict=True):
                losses.append(self.update(batch, number, part, residents))
                residents = None
        return seen, losses

    def experts(self):
        """Return the experts of all layers in the order of their ids."""
        homes = get_homes(self.model)
        flat = [np.asarray(moe.experts[...]).reshape(EXPERTS, 3, WIDTH, HIDDEN) for moe in self.model.layers]
        return np.stack([leaf[row] for leaf, row in zip(flat, homes, strict=True)])


@functools.cache
def trained():
    run = Run()
    return run, *run.train(0, BATCHES)


def assert_same_training(run, seen, losses):
    planned, desired, desired_losses = trained()
    np.testing.assert_allclose(losses, desired_losses[: len(losses)], rtol=5e-6)
    for actual, expected in zip(seen, desired, strict=False):
        np.testing.assert_allclose(actual, expected, atol=2e-5)
    if len(seen) == BATCHES:
        np.testing.assert_allclose(run.experts(), planned.experts(), atol=5e-5)


@pytest.mark.long
def test_training_in_stages_equals_static_placement():
    run, _, _ = trained()
    still = Run(static(), PLAIN)
    before = still.experts()
    assert_same_training(still, *still.train(0, BATCHES))
    assert (get_homes(run.model) != get_homes(still.model)).any()
    assert np.abs(still.experts() - before).max() > 2e-2


@pytest.mark.long
def test_stages_run_over_data_parallel_groups():
    run = Run(topology=Topology(num_nodes=1, ranks_per_node=2, num_experts=8, replica_slots=1), data=2)
    assert_same_training(run, *run.train(0, 2))


@pytest.mark.slow
def test_stages_share_homes_and_residents_but_no_samples():
    recompute, *updates = Run().prepare()
    for stage, own in zip((recompute, *updates), (range(SAMPLES), *PARTS), strict=True):
        sample = np.asarray(stage.batch_plan.assignment.sample)
        assert sorted(sample[sample != EMPTY].tolist()) == list(own)
        plan = stage.batch_plan.plan
        np.testing.assert_array_equal(plan.home, recompute.batch_plan.plan.home)
        residents = resident_experts(plan, TOPOLOGY)
        assert (residents != EMPTY).any()
        np.testing.assert_array_equal(residents, resident_experts(recompute.batch_plan.plan, TOPOLOGY))


@pytest.mark.slow
def test_residents_of_an_update_have_the_weights_after_the_previous_one():
    """With residents from before an update the next update gives NaN, and the host rejects them."""
    losses = []
    for stale in (False, True):
        run = Run()
        recompute, first, second = run.prepare()
        before = PUSH(run.model, run.optimizer, recompute)
        run.update(first, 0, PARTS[0])
        now = PUSH(run.model, run.optimizer, second)
        experts = np.asarray(now.experts)
        layer = np.arange(LAYERS)[:, None, None, None]
        here = np.where((experts != EMPTY)[..., None, None, None], run.experts()[layer, experts], 0)
        np.testing.assert_array_equal(now.weights, here)
        assert np.abs(np.asarray(before.weights) - here).max() > 5e-3
        with pytest.raises(ValueError, match="step"):
            check_residents(before, run.optimizer.step[...], second.batch_plan.plan, TOPOLOGY)
        losses.append(run.update(second, 0, PARTS[1], before if stale else None))
    assert losses[0] == pytest.approx(trained()[2][1], rel=1e-6)
    assert np.isnan(losses[1])


@pytest.mark.slow
def test_stages_of_one_shape_share_program_and_sizes():
    run = Run()
    recompute, first, second = run.prepare()
    assert first.parallel == second.parallel
    assert first.parallel.capacities.flat.own < recompute.parallel.capacities.flat.own
    run.update(first, 0, PARTS[0])
    before = len(TRACES)
    assert before > 0
    run.update(second, 0, PARTS[1])
    assert len(TRACES) == before
    assert sorted(run.balancer.state.capacities) == ["1x16", "2x4"]


def test_prepare_equals_prepare_stages_of_one_stage():
    run, other = Run(), Run()
    one = run.balancer.prepare(run.model, run.optimizer, data()[0][1])
    (same,) = other.prepare(stages=[Stage(2)])
    for actual, desired in zip(jax.tree.leaves(same), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(actual, desired)
    assert one.parallel.capacities == same.parallel.capacities


def test_from_ranks_restores_the_order_of_the_batch():
    numbers = np.arange(2 * SAMPLES).reshape(SAMPLES, 2) + 1
    run = Run()
    stages = run.balancer.prepare_stages(run.model, None, None, STAGES, mask=np.ones((SAMPLES, 2), bool))
    for stage, own in zip(stages, (range(SAMPLES), *PARTS), strict=True):
        inside = np.isin(np.arange(SAMPLES), own)[:, None]
        np.testing.assert_array_equal(stage.from_ranks({"n": stage.to_ranks(numbers)})["n"], numbers * inside)
    with pytest.raises(
        ValueError,
        match=r"sequences\['n'\]: shape \(1, 16, 2\), but the micro-batches and sequences .* are \(2, 4\)",
    ):
        stage.from_ranks({"n": np.zeros((1, 16, 2))})


def test_prepare_stages_without_a_replay_routes_live():
    run = Run()
    stages = run.balancer.prepare_stages(run.model, None, None, STAGES, mask=np.ones((SAMPLES, 3), bool))
    shapes = [stage.to_ranks(np.arange(SAMPLES)).shape for stage in stages]
    assert shapes == [(1, 16), (2, 4), (2, 4)]
    assert sorted(np.asarray(stages[2].to_ranks(np.arange(SAMPLES))).ravel().tolist()) == list(range(8, 16))


def test_stages_are_rejected_after_the_next_prepare():
    run = Run()
    stages = run.prepare()
    with pytest.raises(ValueError, match="the optimizer has made no step since the previous batch"):
        run.prepare(1)
    run.optimizer.step[...] += 1  # a loop may stop early
    run.prepare(1)
    for stage in stages:
        with pytest.raises(ValueError, match="this is batch 1"):
            stage.layers()


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((), "stages must have at least one entry"),
        (
            (Stage(1), Stage(2, range(8, 17))),
            r"stages\[1\]: samples=range\(8, 17\) must be a range of consecutive samples among 16",
        ),
        ((Stage(1), Stage(9, PARTS[0])), r"stages\[1\]: 8 samples are fewer than its 9 micro-batches"),
    ],
)
@pytest.mark.parametrize("live", [False, True], ids=["replay", "live"])
def test_prepare_stages_rejects_malformed_stages(stages, message, live):
    run = Run(static(), PLAIN)
    replay, count = (None, {"mask": np.ones((SAMPLES, 3), bool)}) if live else (data()[0][1], {})
    with pytest.raises(ValueError, match=message):
        run.balancer.prepare_stages(run.model, run.optimizer, replay, stages, **count)


@pytest.mark.slow
def test_checkpoint_has_the_buffer_sizes_of_all_stages(tmp_path):
    """A restored run compiles no other step, and continues bit for bit."""
    run, again = Run(), Run()
    run.train(0, 1)
    with ocp.CheckpointManager(tmp_path) as manager:
        save_training(manager, 1, run.model, run.optimizer, run.balancer)
        manager.wait_until_finished()
        restore_training(manager, again.model, again.optimizer, again.balancer)
    assert again.balancer.state.capacities == run.balancer.state.capacities
    assert sorted(again.balancer.state.capacities) == ["1x16", "2x4"]
    assert again.train(1, BATCHES)[1] == trained()[2][-2:]
