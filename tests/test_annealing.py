"""The annealing driver: frequencies of states that are known, choices without noise, and the noise itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relibra_jax.planning.annealing import anneal, cooling, draw_bits, gumbel, scaled_noise

PROBLEMS, STEPS = 4096, 8


def propose(state, draw):
    """Price both states, the current one first, at 0 and 1; the change is the other state."""
    prices = jnp.stack([state, 1 - state]).astype(jnp.float32) * draw
    return prices, 1 - state


def apply(state, draw, changes, choice):
    """Go to the other state if the choice is 0, and stay if it is -1."""
    del draw
    return jnp.where(choice < 0, state, changes)


def run(state, temperature, *, price=1.0):
    (bits,) = draw_bits(jax.random.key(0), (STEPS, 2, PROBLEMS))
    noise = scaled_noise(bits, jnp.full(STEPS, temperature, jnp.float32))
    return np.asarray(anneal(state, jnp.full(STEPS, price), noise, propose=propose, apply=apply))


@pytest.mark.parametrize("temperature", [0.25, 1.0, 5.0])
@pytest.mark.parametrize("start", [0, 1])
def test_anneal_draws_two_states_by_the_boltzmann_distribution(start, temperature):
    """The state of price 1 is as frequent as ``exp(-1 / temperature)`` says, to four standard errors."""
    state = run(jnp.full(PROBLEMS, start, jnp.int32), temperature)
    expected = 1 / (1 + np.exp(1 / temperature))
    error = np.sqrt(expected * (1 - expected) / PROBLEMS)
    assert abs(state.mean() - expected) <= 4 * error


@pytest.mark.parametrize(("price", "best"), [(1.0, 0), (-1.0, 1)])
def test_anneal_without_temperature_takes_the_cheapest(price, best):
    """The draws reach ``propose``: with negative prices, the other state is the cheapest."""
    state = run(jnp.arange(PROBLEMS, dtype=jnp.int32) % 2, 0.0, price=price)
    assert (state == best).all()


def test_anneal_without_temperature_makes_no_change_of_equal_price():
    start = jnp.arange(PROBLEMS, dtype=jnp.int32) % 2
    np.testing.assert_array_equal(run(start, 0.0, price=0.0), start)


def test_anneal_takes_one_noise_for_all_problems():
    """Noise with one column is that of every problem, so equal problems stay equal."""
    (bits,) = draw_bits(jax.random.key(1), (STEPS, 2, 1))
    noise = scaled_noise(bits, jnp.ones(STEPS))
    state = anneal(jnp.zeros(5, jnp.int32), jnp.ones(STEPS), noise, propose=propose, apply=apply)
    assert len(set(np.asarray(state).tolist())) == 1


def test_gumbel_has_its_mean_and_variance():
    (bits,) = draw_bits(jax.random.key(2), (100_000,))
    noise = np.asarray(gumbel(bits))
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.05)
    assert np.isfinite(np.asarray(gumbel(jnp.array([0, 2**32 - 1], jnp.uint32)))).all()


def test_cooling_ends_at_zero():
    temperature = np.asarray(cooling(1e-2, 1e-4, 100))
    assert (np.diff(temperature[:90]) < 0).all()
    assert temperature[0] == pytest.approx(1e-2)
    assert (temperature[90:] == 0).all()
