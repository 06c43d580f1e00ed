"""The metrics of a step apart from balance: its times, rewards and responses, and what policy and critic learned."""

from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jaxtyping import Float

from experiments.rl.algorithms import Targets
from experiments.rl.correction import Correction, importance_weights, measure_correction
from experiments.rl.metrics import FAILURES, LENGTH_LEVELS, MISMATCH_LEVELS
from experiments.rl.reward_worker import FAILURE_KINDS
from experiments.rl.rewards import Rewards, describe_failures, mean_by_task, mean_or_none
from experiments.rl.rollout import Rollout
from experiments.rl.stages import RecomputeResult
from experiments.rl.step import StepMetrics
from experiments.rl.step_clock import StepClock, exposed_seconds
from experiments.rl.tasks import Example, Task
from relibra_jax.contract.types import Array

SMALLEST_VARIANCE: Final = 1e-10
"""The variance of returns up to which they count as equal: advantages plus values are rounded."""


def measure_speed(num_tokens: int, clock: StepClock) -> dict[str, int | float]:
    """Compute the metrics of tokens, speed and time that all updates have."""
    times = clock.report()
    return {
        "batch/tokens": num_tokens,
        "speed/tokens_per_second": num_tokens / times["time/step_seconds"],
        **times,
    }


def measure_phases(clock: StepClock, plan_ahead_seconds: float | None) -> dict[str, float | None]:
    """Compute the metrics of planning ahead and of the time by which planning delayed a learning step."""
    exposed = exposed_seconds(clock.phases)
    return {
        "time/count_seconds": clock.phases.get("count"),
        "time/plan_ahead_seconds": plan_ahead_seconds,
        "time/exposed_seconds": sum(exposed.values()),
        **{f"time/exposed_{name}_seconds": seconds for name, seconds in exposed.items()},
    }


def measure_memory() -> dict[str, int | None]:
    """Read how much memory of this process's devices is in use. None where the backend does not report it."""
    statistics = [each for device in jax.local_devices() if (each := device.memory_stats())]
    return {
        f"memory/device_{name}": max((each[key] for each in statistics if key in each), default=None)
        for name, key in (("bytes", "bytes_in_use"), ("peak_bytes", "peak_bytes_in_use"))
    }


def measure_rewards(rewards: Rewards, task: Task, examples: Sequence[Example]) -> dict[str, Any]:
    """Compute the metrics of the rewards of a step, from the example of every sample."""
    kinds = [failure.kind for failure in rewards.failures]
    return {
        "reward/mean": mean_or_none(rewards.reward[rewards.scored]),
        "reward/mean_by_task": mean_by_task(task, examples, rewards.reward, rewards.scored),
        "reward/failed": len(kinds),
        **{f"reward/failed_{kind}": kinds.count(kind) for kind in FAILURE_KINDS},
        FAILURES: describe_failures(rewards.failures),
    }


def measure_responses(rollout: Rollout, samples_at_once: int) -> dict[str, Any]:
    """Compute the metrics of the responses of a step, of which ``samples_at_once`` were decoded together."""
    lengths, new = rollout.responses.response_mask.sum(1), rollout.new_mask.sum(1)
    responded = lengths > 0  # an engine may have dropped some samples
    steps = np.maximum.reduceat(new, np.arange(0, len(new), samples_at_once)).sum()
    return {
        "response/tokens": float(lengths[responded].mean()),
        "response/tokens_quantiles": np.quantile(lengths[responded], LENGTH_LEVELS).tolist(),
        "response/longest": int(lengths.max()),
        "response/ended_share": float(rollout.responses.ended[responded].mean()),
        "response/decoding_steps": int(new.max()),
        "response/slots_used_share": float(new.sum() / (samples_at_once * steps)),
    }


def measure_mismatch(rollout: Rollout, recomputed: RecomputeResult, correction: Correction) -> dict[str, Any]:
    """Compare the log-probabilities of the tokens of this rollout with those of the recompute."""
    sampled, old = rollout.responses.log_probs, recomputed.old_log_probs
    difference = np.abs(sampled - old)
    sample, column = np.nonzero(rollout.new_mask & rollout.responses.response_mask)
    values = difference[sample, column].astype(np.float64)
    # The positions in responses, whose first token follows the prompt.
    position = column - rollout.responses.response_mask.argmax(1)[sample]
    tenths = position * 10 // max(int(position.max(initial=0)) + 1, 1)
    counts, sums = np.bincount(tenths, minlength=10), np.bincount(tenths, values, minlength=10)
    older = difference[rollout.older_mask].astype(np.float64)
    return {
        "mismatch/log_prob": mean_or_none(values),
        "mismatch/log_prob_older": mean_or_none(older),
        "mismatch/log_prob_quantiles": np.quantile(values, MISMATCH_LEVELS).tolist() if values.size else None,
        "mismatch/log_prob_by_position": [
            float(total / count) if count else None for total, count in zip(sums, counts, strict=True)
        ],
        **measure_correction(
            importance_weights(old, sampled, correction), rollout.responses.response_mask, correction
        ),
    }


def measure_policy(metrics: StepMetrics) -> dict[str, int | float | None]:
    """Compute the metrics of the policy's updates."""
    terms = {"policy/entropy": metrics.entropy, "policy/reference_kl": metrics.reference_kl}
    return {
        **{name: finite_or_none(term) for name, term in terms.items() if term is not None},
        "policy/loss": finite_or_none(metrics.policy.loss),
        "policy/clipped_share": finite_or_none(metrics.policy.clipped),
        "policy/kl": finite_or_none(metrics.policy.kl),
        "policy/gradient_norm": finite_or_none(metrics.gradient_norm),
        "policy/skipped": int(metrics.skipped),
    }


def finite_or_none(value: float | Float[Array, ""]) -> float | None:
    """Return a number as lines of metrics have it: JSON has neither NaN nor infinity.

    >>> finite_or_none(0.5), finite_or_none(np.nan)
    (0.5, None)
    """
    return float(value) if np.isfinite(value) else None


def measure_critic(
    targets: Targets, rollout: Rollout, recomputed: RecomputeResult, loss: float | None, not_finite: int
) -> dict[str, Any]:
    """Compute the metrics of the critic, with the loss of its last pass. Without a critic there are none."""
    if targets.critic_mask is None or targets.returns is None or recomputed.old_values is None:
        return {}
    returns, error = targets.returns, targets.returns - recomputed.old_values

    def explained(mask: np.ndarray) -> float | None:
        variance = returns[mask].var() if mask.any() else 0
        return float(1 - error[mask].var() / variance) if variance > SMALLEST_VARIANCE else None

    mask = np.asarray(targets.critic_mask)
    finished = mask & rollout.finished[:, None]
    return {
        "critic/loss": None if loss is None else finite_or_none(loss),
        "critic/explained_variance": explained(mask),
        "critic/explained_variance_new": explained(finished & rollout.new_mask),
        "critic/explained_variance_carried": explained(finished & ~rollout.new_mask),
        "critic/not_finite": not_finite,
    }
