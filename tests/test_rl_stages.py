"""Several updates per batch, recomputes with their own plan, and routing that the recompute records."""

import dataclasses
import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from support.runs import SMALL, SMALLEST, update_from

from experiments.float8.hot_ranks import HotRanks
from experiments.rl.algorithms import Targets
from experiments.rl.configs import Train
from experiments.rl.generation import Responses
from experiments.rl.metrics_log import read_metrics
from experiments.rl.rewards import Rewards
from experiments.rl.run_folder import saved_config
from experiments.rl.stages import RecomputeResult, recompute_live, recompute_planned
from experiments.rl.step_clock import StepClock
from experiments.rl.targets import add_targets
from experiments.rl.train import run_train
from experiments.rl.trainer import Trainer
from relibra_jax import relibra
from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.planner import Placement
from relibra_jax.contract.replay import expert_load
from relibra_jax.contract.types import EMPTY, RoutingReplay
from relibra_jax.nnx import get_homes
from relibra_jax.planning.planners import PlannerEntry

pytestmark = pytest.mark.usefixtures("smallest_policy")
OPTIONS = SMALL | {"warmup_steps": 0, "steps": 1, "updates": 2, "epochs": 1}
BATCHES, TOLERANCE = 4, 1e-4


def make(**changes):
    resident_slots = changes.pop("resident_slots", 0)
    config = Train(**(OPTIONS | changes))
    return Trainer(
        dataclasses.replace(config, ranks=dataclasses.replace(config.ranks, resident_slots=resident_slots)), 0
    )


@functools.cache
def batches():
    """Make random tokens, routing and rewards. It matters only that all runs learn the same from them."""
    batches = []
    for number in range(BATCHES):
        rng = np.random.default_rng(number)
        tokens = rng.integers(1, SMALLEST.vocabulary, (32, 21), np.int32)
        length = rng.integers(15, 22, 32)
        mask = np.arange(21) < length[:, None]
        popular = rng.exponential(size=(SMALLEST.layers, 16)) ** 2
        ids = np.argsort(-popular * rng.random((32, 21, SMALLEST.layers, 16)))[..., :2].astype(np.uint8)
        ids *= mask[..., None, None]
        response = mask & (np.arange(21) >= 14)
        responses = Responses(tokens, mask, response, ids, np.zeros((32, 21), np.float32), np.ones(32, bool))
        rewards = Rewards(rng.random(32, np.float32), np.ones(32, bool), [])
        batches.append((responses, rewards))
    return batches


def logical(trainer):
    """Get the parameters as NumPy arrays by name, with experts in the order of their ids."""
    home, parameters = get_homes(trainer.state.agent), {}
    for path, leaf in jax.tree.leaves_with_path(nnx.state(trainer.state.agent, nnx.Param)):
        name, value = jax.tree_util.keystr(path), np.asarray(leaf)
        if "experts']['experts'" in name:
            value = np.take_along_axis(value.reshape(*home.shape, -1), home[..., None], axis=1)
        parameters[name] = value
    return parameters


def learn(trainer, responses, rewards):
    stages = trainer.prepare(responses, StepClock())
    recomputed = recompute_planned(trainer.state, trainer.config, stages)
    return stages, update_from(trainer, stages, responses, rewards, recomputed)


def learn_all(**changes):
    """Learn from all batches; return the parameters before and after, the losses, and the stages of the last batch."""
    trainer, losses = make(**changes), []
    start = logical(trainer)
    for batch in batches():
        stages, metrics = learn(trainer, *batch)
        losses.append(float(metrics.policy.loss))
    return start, logical(trainer), losses, stages


def assert_same_learning(one, other, *, expected_updates):
    (start, actual, losses, stages), (_, expected_params, expected, _) = one, other
    assert len(stages.updates) == expected_updates
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    for name, value in expected_params.items():
        moved = np.linalg.norm(value - start[name])
        assert moved > 1e-3, name
        difference = np.sort(np.abs(actual[name] - value), axis=None)
        # Adam divides a gradient by its size. Where it is nearly zero, rounding alone moves a weight: of few weights.
        few = difference.size // 1000
        assert np.linalg.norm(difference[: difference.size - few]) < TOLERANCE / 2 * moved, name
        assert difference[-1] < 0.1 * np.abs(value - start[name]).max(), name


def place_residents(request, previous_home, topology, *, key):
    """Leave experts where they are. Each rank has a resident: the first expert of the same rank in the next node."""
    ranks = np.roll(np.arange(topology.num_ranks).reshape(topology.num_nodes, -1), -1, 0)
    expert_of_slot = jnp.argsort(previous_home, axis=1)
    return Placement(previous_home, expert_of_slot[:, ranks * topology.home_slots][..., None])


@pytest.mark.long
def test_planned_updates_learn_the_same_as_static_placement(monkeypatch):
    """The planned run has residents, pushed for each update, and a recompute in one micro-batch.

    So few tokens pay for no residents, so they are placed without a price.
    """
    with monkeypatch.context() as patch:
        entry = PlannerEntry(planner=relibra(place=place_residents), summary="residents")
        patch.setattr(Train, "planner_entry", property(lambda _: entry))
        planned = learn_all(resident_slots=1, recompute_micro_batches=1, price="balance")
    assert_same_learning(planned, learn_all(planner="static"), expected_updates=2)
    stages = planned[-1]
    (recompute,) = stages.recompute
    for stage, own in zip((recompute, *stages.updates), (range(32), range(16), range(16, 32)), strict=True):
        sample = np.asarray(stage.batch.batch_plan.assignment.sample)
        assert sorted(sample[sample != EMPTY].tolist()) == list(own)
        plan, topology = stage.batch.batch_plan.plan, stage.batch.parallel.topology
        assert (plan.home == recompute.batch.batch_plan.plan.home).all()
        assert (resident_experts(plan, topology) != EMPTY).any()
    assert len(recompute.batch.batch_plan.load) == 1
    assert stages.updates[0].batch.parallel == stages.updates[1].batch.parallel
    assert stages.updates[0].batch.parallel.capacities.rows < recompute.batch.parallel.capacities.rows


@pytest.mark.long
def test_recompute_with_its_own_plan_does_not_change_learning():
    own = learn_all(updates=1, recompute_micro_batches=1)
    shared = learn_all(updates=1)
    assert_same_learning(own, shared, expected_updates=1)
    assert shared[-1].recompute is shared[-1].updates
    assert own[-1].recompute is not own[-1].updates


@pytest.mark.slow
def test_add_targets_weights_each_update_as_a_batch():
    """The weights of each update's tokens add up to 1. Advantages are those of the whole batch."""
    trainer, (responses, rewards) = make(anneal_steps=0, planner="static"), batches()[0]
    mask = responses.response_mask.copy()
    mask[:16, 15:] = False
    responses = responses._replace(response_mask=mask)
    recomputed = RecomputeResult(np.zeros(mask.shape, np.float32), None)
    stages = trainer.prepare(responses, StepClock())
    advantages = np.where(mask, rewards.reward[:, None], 0).astype(np.float32)
    updates = add_targets(trainer.config, stages.updates, Targets(mask, advantages), recomputed)
    for (batch, samples), own in zip(updates, (slice(0, 16), slice(16, 32)), strict=True):
        weights = batch.from_ranks(samples.weights)
        np.testing.assert_allclose(weights[own], mask[own] / mask[own].sum(), rtol=1e-6)
        assert weights.sum() == pytest.approx(1, abs=1e-6)
        np.testing.assert_array_equal(batch.from_ranks(samples.advantages)[own], advantages[own])


@pytest.mark.long
def test_float8_settings_apply_to_generation_and_recompute(monkeypatch):
    """Here ranks with few rows use float8, too. Log-probabilities are slightly inexact, and updates are exact."""
    rule = functools.partial(HotRanks, min_rows=1)
    monkeypatch.setattr("experiments.rl.configs.HotRanks", rule)
    seen = []

    def recording(*args, float8):
        seen.append(float8)
        return recompute_planned(*args, float8=float8)

    monkeypatch.setattr("experiments.rl.trainer.recompute_planned", recording)
    exact, rollout = make(), make(float8_above=0.0)
    responses = [
        trainer.sampler.respond(trainer.sampler.examples(0), jax.random.key(0)).responses
        for trainer in (exact, rollout)
    ]
    first = responses[0].response_mask.argmax(1)  # the first sampled token, which depends only on the prompt
    same = responses[0].tokens[range(32), first] == responses[1].tokens[range(32), first]
    log_probs = [each.log_probs[range(32), first] for each in responses]
    error = np.abs(log_probs[1] - log_probs[0])[same]
    assert same.mean() > 0.8
    assert 0 < error.max() < 0.1
    both = make(float8_above=0.0, float8_recompute=True)
    for trainer in (rollout, both):
        assert np.isfinite(trainer.learn()["policy/loss"])
    assert seen == [None, rule(threshold=0.0)]


@pytest.mark.slow
def test_updates_replay_the_routing_that_the_recompute_recorded():
    """The recompute runs packed sequences, and experts in chunks. Its routing is that of whole padded sequences."""
    trainer, (responses, rewards) = (
        make(routing="recompute", pack_sequences=True, chunk_tokens=16),
        batches()[0],
    )
    state = trainer.state
    assert state.balancer.live.chunk_tokens == 16
    recorded, recomputed, _ = recompute_live(state, trainer.config, responses)
    parallel = dataclasses.replace(state.balancer.live, chunk_tokens=1024)
    output = state.agent.policy(responses.tokens, responses.mask, parallel=parallel)
    ids = np.where(responses.mask[..., None, None], output.expert_ids, 0)
    np.testing.assert_array_equal(recorded.expert_ids, ids)
    assert recorded.expert_ids.dtype == np.uint8
    assert (recorded.expert_ids != responses.expert_ids).any()
    stages = trainer.prepare(recorded, StepClock())
    assert stages.recompute == ()
    for batch, samples in stages.updates:
        plan = batch.batch_plan
        np.testing.assert_array_equal(
            plan.load, expert_load(RoutingReplay(ids, responses.mask), plan.assignment, num_experts=16)
        )
        in_stage = np.isin(np.arange(32), np.asarray(plan.assignment.sample))[:, None, None, None]
        np.testing.assert_array_equal(batch.from_ranks(samples.expert_ids), ids * in_stage)
    metrics = update_from(trainer, stages, recorded, rewards, recomputed)
    load = np.concatenate([batch.batch_plan.load for batch, _ in stages.updates])
    np.testing.assert_array_equal(metrics.load, load)
    changed = np.asarray(metrics.routing_changed)
    assert changed.shape == (4, SMALLEST.layers)
    assert not changed[:2].any(), "before the first step the live router is that of the recompute"


@pytest.mark.long
def test_report_prints_the_imbalance_of_a_live_recompute(tmp_path):
    shown = io.StringIO()
    config = dataclasses.replace(Train(**(OPTIONS | {"routing": "recompute"})), out=tmp_path / "run")
    run_train(config, Console(file=shown, width=250))
    [line] = [
        line
        for line in read_metrics(tmp_path / "run" / "seed-0" / "metrics.jsonl")
        if line["kind"] == "learn"
    ]
    assert line["balance/imbalance_recompute"] > line["balance/imbalance"]
    assert len(line["balance/imbalance_by_micro_batch"]) == 4
    note = (
        f"recompute, seed 0: it recorded its routing and so ran without a plan, at imbalance"
        f" {line['balance/imbalance_recompute']:.4f}; in the updates the same routing ran under a plan, at imbalance"
        f" {line['balance/imbalance']:.4f}"
    )
    assert note in shown.getvalue()


@pytest.mark.parametrize(
    "changes",
    [{"recompute_micro_batches": 4}, {"float8_above": 1.25, "float8_recompute": True}],
    ids=["stages", "float8"],
)
def test_saved_config_equals_the_settings(changes, tmp_path):
    config = Train(**(OPTIONS | changes))
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config), default=str))
    assert saved_config(tmp_path) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"updates": 3},
            "prompts=8 must divide evenly over updates=3: responses to one prompt stay together",
        ),
        (
            {"updates": 4},
            "prompts=8 x responses_per_prompt=4 = 32 samples over updates=4 must divide evenly over 8 ranks x"
            " micro_batches=2",
        ),
        (
            {"recompute_micro_batches": 3},
            "= 32 samples must divide evenly over 8 ranks x recompute_micro_batches=3",
        ),
        ({"recompute_micro_batches": 0}, "recompute_micro_batches=0 must be an integer of at least 1"),
        ({"chunk_tokens": 0}, "chunk_tokens=0 must be an integer of at least 1"),
        (
            {"routing": "rollouts"},
            "routing 'rollouts' must be one of rollout, recompute; did you mean rollout",
        ),
        (
            {"routing": "recompute", "replay": False},
            "routing=recompute needs replay=True: it records the routing that updates replay",
        ),
        ({"float8_above": -1.0}, "float8_above=-1.0 must be at least 0"),
        ({"float8_recompute": True}, "float8_recompute=True needs float8_above, the load above which ranks"),
        (
            {"float8_recompute": True, "float8_above": 1.2, "routing": "recompute"},
            "float8_recompute=True needs routing=rollout: with routing=recompute the recompute is exact",
        ),
    ],
)
def test_train_rejects_bad_settings_of_stages(changes, message):
    with pytest.raises(ValueError, match=message):
        Train(**(OPTIONS | {"updates": 1} | changes))
