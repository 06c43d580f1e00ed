"""The divergence from a reference and the entropy bonus equal loops in float64, and runs keep their reference."""

import dataclasses
import json
import math

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from support.runs import SMALL

from experiments.rl.configs import Train
from experiments.rl.losses import LARGEST_LOG_RATIO, Clip, token_weights
from experiments.rl.objective import Losses, policy_terms
from experiments.rl.policy import Agent
from experiments.rl.reference import Reference, reference_kl
from experiments.rl.run_folder import saved_config
from experiments.rl.stages import recompute_planned, recompute_reference
from experiments.rl.step_clock import StepClock
from experiments.rl.trainer import Trainer
from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.types import EMPTY
from relibra_jax.evaluation import Ranks
from relibra_jax.execution.memory import HOST
from relibra_jax.nnx import get_homes
from relibra_jax.nnx.logical import from_logical, logical_params

SAMPLES, TOKENS = 6, 5
RNG = np.random.default_rng(0)
WEIGHTS = np.asarray(token_weights(RNG.random((SAMPLES, TOKENS)) < 0.7, "responses"))
LOG_PROBS = np.log(RNG.random((SAMPLES, TOKENS))).astype(np.float32)
REFERENCE = (LOG_PROBS + RNG.normal(0, 0.5, LOG_PROBS.shape)).astype(np.float32)
REFERENCE[WEIGHTS == 0] = np.nan  # tokens without a weight may have any


def loop(kind, log_probs, reference):
    """Return the divergence and its gradient, token by token."""
    total, slopes = 0.0, np.zeros(log_probs.shape)
    for i, t in zip(*np.nonzero(WEIGHTS), strict=True):
        weight = float(WEIGHTS[i, t])
        exact = float(log_probs[i, t]) - float(reference[i, t])
        d = max(min(exact, LARGEST_LOG_RATIO), -LARGEST_LOG_RATIO)
        value, slope = {"k1": (d, d), "k2": (d * d / 2, d), "k3": (math.expm1(-d) + d, -math.expm1(-d))}[kind]
        total += weight * value
        slopes[i, t] = weight * slope if d == exact else 0
    return total, slopes


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("extreme", [0.0, 18.0, 100.0, -100.0, 1e30])
def test_reference_kl_and_its_gradient_equal_a_loop_in_float64(kind, extreme):
    reference = REFERENCE.copy()
    i, t = np.argwhere(WEIGHTS > 0)[3]
    reference[i, t] -= np.float32(extreme)
    run = jax.value_and_grad(lambda new: reference_kl(new, reference, WEIGHTS, kind=kind))
    value, slope = run(LOG_PROBS)
    expected, slopes = loop(kind, LOG_PROBS, reference)
    assert float(value) == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(slope, slopes, rtol=1e-4, atol=1e-6)


def test_estimators_have_the_right_mean_and_gradient():
    """Over all tokens of a distribution, as the docstring of the file says."""
    rng = np.random.default_rng(1)
    logits, others = rng.normal(size=(2, 9)).astype(np.float32)
    p, q = (np.asarray(jax.nn.softmax(each), np.float64) for each in (logits, others))
    divergence = (p * np.log(p / q)).sum()

    def estimate(logits, kind):
        each = [
            reference_kl(
                row[None], np.log(q)[n : n + 1].astype(np.float32), np.ones(1, np.float32), kind=kind
            )
            for n, row in enumerate(jax.nn.log_softmax(logits))
        ]
        return (p.astype(np.float32) * jax.numpy.stack(each)).sum()

    forward = p * (np.log(p / q) - divergence)
    for kind, unbiased in (("k1", True), ("k2", False), ("k3", True)):
        value, slope = jax.value_and_grad(estimate)(logits, kind)
        if unbiased:
            assert float(value) == pytest.approx(divergence, rel=1e-4)
        np.testing.assert_allclose(slope, p - q if kind == "k3" else forward, atol=1e-6)


@pytest.mark.parametrize("entropy", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["none", "k3"])
def test_terms_add_up_with_their_factors(entropy, kind):
    reference = Reference() if kind == "none" else Reference(kind=kind, factor=0.7)
    losses = Losses(clip=Clip(high=0.2), entropy=entropy, reference=reference)
    entropies = np.where(WEIGHTS > 0, RNG.random(WEIGHTS.shape), np.nan).astype(np.float32)
    advantages = RNG.normal(size=WEIGHTS.shape).astype(np.float32)

    def loss(log_probs, entropies, of_reference):
        return policy_terms(
            *(log_probs, entropies, LOG_PROBS, advantages, WEIGHTS, of_reference), losses=losses
        )

    of_reference = None if kind == "none" else REFERENCE
    (total, terms), slopes = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        LOG_PROBS, entropies, of_reference
    )
    weights = WEIGHTS.astype(np.float64)
    used = weights > 0
    mean = (weights[used] * entropies[used]).sum()
    assert float(terms.entropy) == pytest.approx(mean, rel=1e-5)
    divergence, of_divergence = loop("k3", LOG_PROBS, REFERENCE) if of_reference is not None else (0, 0)
    assert (terms.reference_kl is None) == (of_reference is None)
    expected = -(weights * advantages).sum() - entropy * mean + 0.7 * divergence
    assert float(total) == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(slopes[0], -weights * advantages + 0.7 * of_divergence, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(slopes[1], -entropy * weights, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "k4"}, "reference.kind 'k4' must be one of none, k1, k2, k3"),
        ({"kind": "k3"}, "reference.factor=0.0 must be positive"),
        ({"kind": "k3", "factor": -1.0}, "reference.factor=-1.0 must be positive"),
        ({"kind": "k3", "factor": math.nan}, "reference.factor=nan must be positive"),
        ({"factor": 0.1}, "reference.factor=0.1 is not used by reference.kind=none"),
        ({"memory": "device"}, "reference.memory=device is not used by reference.kind=none"),
        ({"kind": "k3", "factor": 0.1, "memory": "host"}, "reference.memory 'host' must be one of device"),
    ],
)
def test_references_that_mean_nothing_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        Reference(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"entropy": -0.1}, "entropy=-0.1 must be at least 0"),
        (
            {"reference": Reference(kind="k3", factor=0.1), "steps": 0},
            "reference.kind=k3 needs learning steps, and steps=0: no update would compare",
        ),
    ],
)
def test_train_rejects_terms_that_mean_nothing(settings, message):
    with pytest.raises(ValueError, match=message):
        Train(**settings)


def test_saved_config_equals_the_settings(tmp_path):
    config = Train(entropy=0.01, reference=Reference(kind="k1", factor=0.1, memory="device"))
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config), default=str))
    assert saved_config(tmp_path) == config


RUN = SMALL | {"warmup_steps": 1, "steps": 3, "epochs": 1, "entropy": 0.01}


def run_of(**changes):
    reference = Reference(kind="k3", factor=0.5, memory=changes.pop("memory", HOST))
    ranks = Ranks(nodes=2, ranks_per_node=1, resident_slots=1)
    return Trainer(Train(**(RUN | changes), reference=reference, ranks=ranks), 0)


def logical(policy):
    return {name: np.asarray(array) for name, array in logical_params(policy).items()}


@pytest.mark.long
@pytest.mark.usefixtures("smallest_policy")
def test_a_run_keeps_its_reference_where_experts_move_and_resumes_with_it(tmp_path):
    """Its residents have its own weights, and a resumed run learns the same bits."""
    trainer, lines = run_of(), []
    trainer.warm_up()
    before = logical(trainer.state.agent.policy)
    homes = get_homes(trainer.state.agent)
    lines.append(trainer.learn())
    # The first update starts from the reference, and has the same program for both recomputes.
    assert lines[0]["policy/reference_kl"] == 0
    with ocp.CheckpointManager(tmp_path) as manager:
        lines.append(trainer.learn())
        trainer.state.save(manager)
        lines.append(trainer.learn())
        assert (get_homes(trainer.state.agent) != homes).any()
        assert_same(logical(trainer.state.reference.policy), before)
        assert lines[1]["policy/reference_kl"] > 0
        assert lines[1]["policy/entropy"] > 0
        resumed = run_of()
        resumed.restore(manager)
        assert_same(logical(resumed.state.reference.policy), before)
        again = resumed.learn()
        for name in ("policy/reference_kl", "policy/loss", "policy/entropy", "policy/gradient_norm"):
            assert again[name] == lines[2][name], name
        assert_same(logical(resumed.state.agent.policy), logical(trainer.state.agent.policy))
        with pytest.raises(
            ValueError, match="its checkpoints have reference=kept, but this run has reference=none"
        ):
            Trainer(Train(**RUN), 0).restore(manager)
    # A policy with the weights of the reference has its log-probabilities, under the same plan.
    stages = resumed.prepare(resumed.responses, StepClock())
    plan, topology = stages.updates[0].batch.batch_plan.plan, resumed.config.topology
    assert (resident_experts(plan, topology) != EMPTY).any()
    of_reference = recompute_reference(resumed.state, resumed.config, stages)
    from_logical(resumed.state.agent.policy, before)
    of_policy = recompute_planned(resumed.state, resumed.config, stages).old_log_probs
    np.testing.assert_array_equal(of_reference, of_policy)


def assert_same(one, other):
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value, err_msg=name)


@pytest.mark.slow
@pytest.mark.usefixtures("smallest_policy")
@pytest.mark.parametrize(("state_memory", "memory"), [("device", "device"), (HOST, HOST)])
def test_a_reference_is_a_copy_in_the_dtype_of_the_computation_in_the_memory_of_its_setting(
    state_memory, memory
):
    trainer = run_of(memory=memory, state_memory=state_memory, dtype="bfloat16")
    trainer.state.keep_reference()
    for (path, leaf), (_, own) in zip(
        nnx.to_flat_state(nnx.state(trainer.state.reference, nnx.Param)),
        nnx.to_flat_state(nnx.state(Agent(trainer.state.agent.policy), nnx.Param)),
        strict=True,
    ):
        value, original = leaf.get_raw_value(), own.get_raw_value()
        assert value.sharding.memory_kind == memory, path
        assert value.sharding.is_equivalent_to(original.sharding.with_memory_kind(memory), value.ndim), path
        assert value.dtype == (leaf.get_metadata("compute_dtype", None) or np.float32), path
        np.testing.assert_array_equal(np.asarray(value), np.asarray(original).astype(value.dtype))
