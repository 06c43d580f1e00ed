"""Planning ahead in a run: the search gets the counts of ended responses, and changes no response."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.runs import HASTY, SMALL

from experiments.rl.configs import Train
from experiments.rl.plan_ahead import PlanAhead
from experiments.rl.rollout import make_engine
from experiments.rl.step_clock import StepClock
from experiments.rl.trainer import Trainer
from relibra_jax.contract.replay import sample_load
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.nnx import get_homes

pytestmark = pytest.mark.usefixtures("smallest_policy")
AHEAD = {"watch_every": 1, "plan_ahead": 0.5}


def make(**changes):
    return Trainer(Train(**(SMALL | {"warmup_steps": 0, "epochs": 1} | changes)), 0, tokenizer=HASTY)


@pytest.fixture(scope="module")
def stepped(smallest_policy):
    """Make two equal runs that plan ahead and one that does not, with two steps each; return trainers and metrics."""
    trainers = [make(**AHEAD), make(**AHEAD), make()]
    return trainers, [[trainer.learn() for _ in range(2)] for trainer in trainers]


@pytest.mark.long
def test_plan_ahead_changes_no_response_and_is_deterministic(stepped):
    (one, other, _), (metrics, again, without) = stepped
    for actual, same, plain in zip(metrics, again, without, strict=True):
        assert actual["time/plan_ahead_seconds"] > 0
        assert 0 < actual["time/count_seconds"] < actual["time/generate_seconds"]
        assert plain["time/plan_ahead_seconds"] is None
        assert actual["policy/loss"] == same["policy/loss"]
        assert actual["balance/imbalance"] == same["balance/imbalance"]
        assert 1 <= actual["balance/imbalance"] < actual["balance/imbalance_static"]
    np.testing.assert_array_equal(get_homes(one.state.agent), get_homes(other.state.agent))
    # Before the first update all runs have the same weights.
    assert metrics[0]["response/tokens"] == without[0]["response/tokens"]
    # A search from the counts of ended responses finds other plans than one from all of them.
    imbalances = [[step["balance/imbalance"] for step in run] for run in (metrics, without)]
    assert imbalances[0] != imbalances[1]


@pytest.mark.long
@pytest.mark.parametrize("wave_samples", [None, 16])
def test_plan_ahead_searches_with_the_counts_of_ended_responses(stepped, wave_samples, monkeypatch):
    (trainer, *_), _ = stepped
    config = dataclasses.replace(trainer.config, wave_samples=wave_samples)
    monkeypatch.setattr(trainer.sampler, "engine", make_engine(config, trainer.state))
    trainer.sampler.sync()
    calls = []
    monkeypatch.setattr(trainer.state.balancer, "plan_ahead", lambda *counts, **stages: calls.append(counts))
    with ThreadPoolExecutor(1) as beside:
        ahead = PlanAhead(trainer.state, trainer.config, beside, StepClock())
        examples = trainer.sampler.examples(0)
        responses = trainer.sampler.respond(examples, trainer.state.key, watch=ahead.watch).responses
        assert ahead.wait() >= 0
        # A step that samples another window does not search again.
        assert not ahead.watch.look(np.ones(32, bool), lambda: pytest.fail("counted again"))
    [((load, tokens, *_), ended)] = calls
    assert 16 <= ended.sum() < 32
    length = responses.mask.sum(1)
    np.testing.assert_array_equal(tokens, np.where(ended, length, 0))
    mask = responses.mask & ended[:, None]
    expected = sample_load(RoutingReplay(responses.expert_ids, mask), num_experts=16)
    np.testing.assert_array_equal(load, expected)
    if wave_samples is not None:
        # The search starts when the first of two waves has finished, or later.
        assert ended[:wave_samples].all()
        return
    # Responses that had not ended are longer than all that had.
    sampled = responses.response_mask.sum(1)
    assert sampled[ended].max() < sampled[~ended].min()


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"planner": "eplb"}, {"plan_ahead": 1.0}])
def test_plan_ahead_has_no_watch_if_it_is_off(stepped, changes):
    state = stepped[0][0].state
    with ThreadPoolExecutor(1) as beside:
        assert PlanAhead(state, Train(**SMALL), beside, StepClock()).watch is not None
        assert PlanAhead(state, Train(**(SMALL | changes)), beside, StepClock()).watch is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"plan_ahead": 0.0}, "plan_ahead=0.0 must be positive and finite"),
        ({"plan_ahead": 1.5}, "plan_ahead=1.5 must be at most 1: it is a share of the responses"),
        (
            {"planner": "eplb", "plan_ahead": 0.5},
            "planner=eplb does not use plan_ahead=0.5, which is only for relibra",
        ),
        ({"watch_every": 0}, "watch_every=0 must be an integer of at least 1"),
    ],
)
def test_train_rejects_bad_settings_of_planning_ahead(changes, says):
    with pytest.raises(ValueError, match=says):
        Train(**(SMALL | changes))
