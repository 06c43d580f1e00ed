"""AdamW with moments in bfloat16: it learns the same up to rounding, in half the memory, and moves with its experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from support.runs import SIZES, SMALL

from experiments.rl.configs import Train
from experiments.rl.optimizer import AdamW, learning_rate, make_optimizer, store_state_in
from experiments.rl.trainer import Trainer
from relibra_jax.execution.expert_labels import optimizer_layers
from relibra_jax.models import pretrained_tensors

pytestmark = pytest.mark.usefixtures("smallest_policy")
ROUNDING = 2.0**-8
"""The largest relative error of a number that is rounded to bfloat16."""


@pytest.fixture(scope="module", autouse=True)
def _first_sizes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.rl.state.FIRST_CAPACITIES", SIZES)
        yield


@functools.cache
def trained(moments):
    """Warm up for two updates, then learn once, under plans that move experts; return the trainer and the metrics."""
    trainer = Trainer(Train(**(SMALL | {"moments": moments})), 0)
    return trainer, [trainer.warm_up(), trainer.warm_up(), trainer.learn()]


def test_settings_of_adamw_reach_optax():
    settings = AdamW(b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.1, schedule="cosine", rising_updates=1)
    actual = make_optimizer(0.5, 0.1, 2, settings, updates=5, moments="float32")
    rates = [0.5, 0.5, 0.0, *(0.1 * 0.5 * (1 + np.cos(np.pi * np.arange(4) / 4)))]
    params, rng = {"x": jnp.ones(3)}, np.random.default_rng(0)
    state = actual.init(params)
    mu, nu = np.zeros(3), np.zeros(3)
    for step, rate in enumerate(rates):
        gradient = rng.normal(size=3)
        updates, state = actual.update({"x": jnp.asarray(gradient, jnp.float32)}, state, params)
        mu, nu = 0.8 * mu + 0.2 * gradient, 0.9 * nu + 0.1 * gradient**2
        scaled = mu / (1 - 0.8 ** (step + 1)) / (np.sqrt(nu / (1 - 0.9 ** (step + 1))) + 1e-3)
        np.testing.assert_allclose(updates["x"], -rate * (scaled + 0.1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"schedule": "cosin"},
            r"adamw\.schedule 'cosin' must be one of constant, cosine, linear; did you mean",
        ),
        ({"b2": 1.5}, r"adamw\.b2=1\.5 must be at least 0 and below 1"),
        ({"final_share": 0.1}, r"adamw\.final_share=0\.1 is not for a constant learning rate"),
        ({"largest_gradient": 0.0}, r"adamw\.largest_gradient=0\.0 must be"),
    ],
)
def test_settings_of_adamw_that_mean_nothing_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        AdamW(**settings)


def test_the_learning_rate_of_a_run_without_updates_is_defined():
    assert float(learning_rate(0.1, AdamW(schedule="cosine", rising_updates=4), 1)(0)) == 0


def test_moments_in_bfloat16_give_the_updates_of_float32_up_to_rounding():
    """Gradients change in size tenfold, and the moments must follow them up and down."""
    exact = optax.scale_by_adam(b2=AdamW().b2)
    rounded = store_state_in("bfloat16", exact)
    states = [tx.init(jnp.zeros(1000)) for tx in (exact, rounded)]
    rng = np.random.default_rng(0)
    for step in range(200):
        gradient = jnp.asarray(rng.normal(1, 1, 1000) * 10 ** np.sin(step / 20), jnp.float32)
        (expected, states[0]), (actual, states[1]) = (
            tx.update(gradient, state) for tx, state in zip((exact, rounded), states, strict=True)
        )
        # While gradients shrink, moments are rounded towards their old values, so the errors of steps add up.
        error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert error < 3 * ROUNDING, step
    np.testing.assert_allclose(states[1].nu.astype(jnp.float32), states[0].nu, rtol=10 * ROUNDING)
    assert (states[1].mu.dtype, states[1].nu.dtype, states[1].count.dtype) == (
        "bfloat16",
        "bfloat16",
        "int32",
    )


def test_optax_finds_the_parameters_in_a_stored_state():
    params = {"experts": jnp.zeros((1, 1, 3)), "router": jnp.zeros(4)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), store_state_in("bfloat16", optax.adamw(1e-3)))
    labels = optimizer_layers(tx, tx.init(params), {"experts": 0, "router": None})
    assert labels[1][0].mu == labels[1][0].nu == {"experts": 0, "router": None}


@pytest.mark.long
def test_a_run_with_moments_in_bfloat16_learns_the_same_up_to_rounding():
    (exact, of_exact), (rounded, of_rounded) = trained("float32"), trained("bfloat16")
    for before, after in zip(of_exact[:2], of_rounded[:2], strict=True):
        assert after["warmup/loss"] == pytest.approx(before["warmup/loss"], rel=1e-3)
    new = Trainer(exact.config, 0)
    start, desired, actual = (
        {name: np.asarray(value) for name, value in pretrained_tensors(trainer.state.agent.policy)}
        for trainer in (new, exact, rounded)
    )
    for name, value in actual.items():
        learned = np.linalg.norm(desired[name] - start[name])
        assert np.linalg.norm(value - desired[name]) < 0.02 * learned, name


@pytest.mark.slow
def test_moments_in_bfloat16_take_half_the_memory_and_stay_where_their_experts_are():
    sizes = {}
    for moments in ("float32", "bfloat16"):
        state = trained(moments)[0].state
        leaves = jax.tree.leaves(nnx.state(state.optimizer.opt_state))
        sizes[moments] = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves if leaf.ndim)
        params = sum(
            leaf.addressable_shards[0].data.nbytes
            for leaf in jax.tree.leaves(nnx.state(state.agent, nnx.Param))
        )
        assert sizes[moments] == params * {"float32": 2, "bfloat16": 1}[moments]


@pytest.mark.slow
def test_resume_with_another_dtype_of_moments_says_so(tmp_path):
    trainers = {moments: trained(moments)[0] for moments in ("float32", "bfloat16")}
    for moments, other in (("float32", "bfloat16"), ("bfloat16", "float32")):
        with ocp.CheckpointManager(tmp_path / moments) as manager:
            trainers[moments].state.save(manager)
            manager.wait_until_finished()
            message = f"its checkpoints have moments={moments}, but this run has moments={other}"
            with pytest.raises(ValueError, match=message):
                trainers[other].restore(manager)
            trainers[moments].restore(manager)


def test_train_rejects_an_unknown_dtype_of_moments():
    with pytest.raises(ValueError, match="moments 'float16' must be one of float32, bfloat16"):
        Train(moments="float16")
