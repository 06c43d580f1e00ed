"""What a run does with an engine's responses: dropped samples, versions, and batches that are sampled ahead."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from experiments.engines.protocol import EngineError, Generation, RolloutEngine, Sent
from experiments.examples import tiny_checkpoint
from experiments.rl.configs import Train
from experiments.rl.correction import Correction
from experiments.rl.generation import Responses
from experiments.rl.policy import TINY
from experiments.rl.rewards import Rewards
from experiments.rl.stages import RecomputeResult
from experiments.rl.step_clock import StepClock
from experiments.rl.step_metrics import measure_mismatch, measure_responses
from experiments.rl.targets import compute_targets
from experiments.rl.trainer import Trainer

pytestmark = pytest.mark.slow
SETTINGS = {"task": "count", "warmup_steps": 1, "steps": 3, "prompts": 8, "responses_per_prompt": 4}
SETTINGS |= {"prompt_tokens": 80, "response_tokens": 6, "micro_batches": 2, "anneal_steps": 20}
SMALLEST = {"width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "expert_width": 16}


class FakeEngine:
    """An engine whose responses are two tokens for every sample but those of ``dropped``."""

    def __init__(self):
        self.calls, self.version, self.dropped, self.error = [], None, [], None
        self.older = 0
        """The number of updates by which the first token of a response is older than the second."""

    def sync(self, policy, version):
        if version != self.version:
            self.calls.append(f"sync {version}")
            self.version = version
            return Sent(100, 0.5)
        return Sent()

    def generate(self, prompts, lengths, keys, sampling, *, responses_per_prompt=1, watch=None):
        if self.error is not None:
            raise self.error
        self.calls.append(f"generate with {self.version}")
        width = prompts.shape[1]
        at = np.arange(width + sampling.max_new_tokens)
        mask = at < lengths[:, None] + 2
        mask[self.dropped] = False
        response_mask = mask & (at >= lengths[:, None])
        tokens = np.where(response_mask, sampling.ends[0], 0).astype(np.int32)
        ids = np.zeros((*mask.shape, SMALLEST["layers"], TINY.top_k), np.uint8)
        log_probs = np.where(response_mask, -1, 0).astype(np.float32)
        responses = Responses(tokens, mask, response_mask, ids, log_probs, mask.any(1))
        version = np.where(at == lengths[:, None], self.version - self.older, self.version)
        version = np.where(response_mask, version, -1)
        return Generation(responses, version, ~mask.any(1), filled=mask.any(1))

    def close(self):
        self.calls.append("close")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_checkpoint, "POLICIES", {"tiny": dataclasses.replace(TINY, **SMALLEST)})
        return tiny_checkpoint.make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", head_width=8)


@pytest.fixture
def trainer(folder):
    """Return a function that makes a trainer whose engine is a fake."""

    def make(**changes):
        made = Trainer(Train(model=folder, engine=("http://server:1",), **{**SETTINGS, **changes}), 0)
        made.sampler.engine = FakeEngine()
        assert isinstance(made.sampler.engine, RolloutEngine)
        return made

    return make


def roll_out(trainer):
    with ThreadPoolExecutor(2) as executor:
        rollout = trainer.sampler.roll_out(executor, None, StepClock())
        rewards = rollout.rewards()
    return rollout, rewards


def test_dropped_samples_have_no_part_in_advantages_and_metrics(trainer):
    one = trainer()
    one.sampler.engine.dropped = [2, 7]
    rollout, rewards = roll_out(one)
    assert np.flatnonzero(~rewards.scored).tolist() == [2, 7]
    # All other responses have the same reward: a dropped one that counted as 0 would give them an advantage.
    equal = Rewards(rewards.scored.astype(np.float32), rewards.scored, [])
    recomputed = RecomputeResult(rollout.responses.log_probs, None)
    targets, _ = compute_targets(one.config, rollout, equal, recomputed)
    assert not targets.advantages.any()
    assert not targets.policy_mask[[2, 7]].any()
    assert rollout.metrics["rollout/dropped"] == 2
    measured = measure_responses(rollout, 32)
    assert measured["response/tokens"] == 2
    assert measured["response/ended_share"] == 1


def test_a_batch_without_any_response_ends_the_run(trainer):
    one = trainer()
    one.sampler.engine.dropped = list(range(32))
    with pytest.raises(EngineError, match="step 0: no sample has a response: the engine gave none"):
        roll_out(one)


def test_mismatch_is_the_difference_of_log_probabilities(trainer):
    one = trainer()
    rollout, _ = roll_out(one)
    old = np.where(rollout.new_mask, -1.5, 0).astype(np.float32)
    old[0, np.flatnonzero(rollout.new_mask[0])[0]] = -1
    mismatch = measure_mismatch(rollout, RecomputeResult(old, None), Correction())
    assert mismatch["mismatch/log_prob"] == pytest.approx(0.5 * 63 / 64)
    assert mismatch["mismatch/log_prob_quantiles"] == pytest.approx([0.5] * 4)
    first, *between, second = mismatch["mismatch/log_prob_by_position"]
    assert first == pytest.approx(0.5 * 31 / 32)
    assert between.count(None) == 8 - between.count(0.5)
    assert 0.5 in (second, *between)


def test_the_next_batch_is_sampled_with_the_weights_before_the_update(trainer):
    """Evaluations wait for it, and the last step samples nothing ahead."""
    one = trainer(staleness=1)
    sampler, engine, state = one.sampler, one.sampler.engine, one.state
    state.step = 1
    seen = []
    for _ in range(3):
        rollout, _ = roll_out(one)
        seen.append((rollout.metrics["rollout/staleness"], rollout.metrics["rollout/sync_bytes"]))
        wait(sampler._ahead._batches)
        state.step += 1
    one.evaluate()
    one.close()
    assert seen == [(0.0, 100), (1.0, 100), (1.0, 100)]
    assert engine.calls == [
        *("sync 1", "generate with 1", "generate with 1"),
        *("sync 2", "generate with 2"),
        *("sync 3", "sync 4", *["generate with 4"] * one.config.evaluation_batches),
        "close",
    ]


def test_staleness_is_that_of_tokens(trainer):
    one = trainer(staleness=2)
    one.state.step, one.sampler.engine.older, one.sampler.engine.dropped = 3, 2, [3]
    metrics = roll_out(one)[0].metrics
    one.close()
    assert metrics["rollout/staleness"] == 1, (
        "one token of each response is 2 updates old, the other is not old"
    )
    assert metrics["rollout/staleness_max"] == 2
    assert metrics["rollout/continued"] == one.config.samples - 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_token_beyond_the_bound_is_an_error(trainer, staleness):
    one = trainer(staleness=staleness)
    one.state.step, one.sampler.engine.older = 3, 2
    with pytest.raises(AssertionError, match="a token is 2 updates old"):
        roll_out(one)
    one.close()


def test_an_error_of_a_batch_that_is_sampled_ahead_comes_with_the_next_step(trainer):
    one = trainer(staleness=1)
    one.state.step = 1
    with ThreadPoolExecutor(2) as executor:
        one.sampler.roll_out(executor, None, StepClock()).rewards()
        wait(one.sampler._ahead._batches)
        one.state.step = 2
        one.sampler.engine.error = EngineError("no server")
        one.sampler.roll_out(executor, None, StepClock()).rewards()
        one.state.step = 3
        with pytest.raises(EngineError, match="no server"):
            one.sampler.roll_out(executor, None, StepClock())
    one.close()
