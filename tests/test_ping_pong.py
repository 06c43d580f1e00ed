"""The ping-pong schedule: the closed form against the simulation, and both against general bounds."""

import numpy as np
import pytest
from support.ping_pong import run_schedule

from experiments.deploy.ping_pong import simulate_ping_pong, step_time


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
def test_simulate_ping_pong_of_equal_times_is_the_closed_form(micro_batches):
    rng, layers = np.random.default_rng(micro_batches), 4
    covered = 0
    for attention, experts, exchange in rng.uniform(0.1, 3.0, (30, 3)).astype(np.float32).tolist():
        times = np.ones((layers, micro_batches), np.float32)
        schedule = simulate_ping_pong(attention * times, experts * times, exchange * times)
        seconds = float(step_time(attention, experts, exchange, micro_batches=micro_batches, layers=layers))
        assert float(schedule.seconds) == pytest.approx(seconds, rel=1e-5)
        longest, trip = max(attention, experts, exchange), attention + experts + 2 * exchange
        published = trip + longest * (micro_batches * layers - 1)
        assert seconds >= published * (1 - 1e-5), "the published form is a bound"
        if micro_batches * longest >= trip:
            covered += 1
            assert seconds == pytest.approx(published, rel=1e-5)
    assert bool(covered) == (micro_batches > 1)


def test_simulate_ping_pong_agrees_with_plain_python_and_its_bounds():
    for seed in range(30):
        attention, experts, exchange = (
            np.random.default_rng(seed).exponential(1.0, (3, 4, 3)).astype(np.float32)
        )
        schedule = simulate_ping_pong(attention, experts, exchange)
        seconds = float(schedule.seconds)
        assert seconds == pytest.approx(run_schedule(attention, experts, exchange), rel=1e-5)
        trips = attention + experts + 2 * exchange
        stages = [each.sum() for each in (attention, experts, exchange)]
        assert seconds >= max(*stages, trips.sum(0).max()) * (1 - 1e-5)
        np.testing.assert_array_less(
            np.asarray(schedule.attention_start + attention + exchange) * (1 - 1e-5), schedule.expert_start
        )
