"""The metrics of runs: every name that a run writes, with its unit and its meaning.

Dashboards and scripts rely on the names. A line of a kind has all names of that kind and no others.
docs/guides/metrics.md shows the same list.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from relibra_jax.cost.batch_time import PARTS

WARM_UP, LEARN, EVALUATE = "warm-up", "learn", "evaluation"
"""The kinds of lines: a supervised update, a learning step from a batch of responses, an evaluation."""
FAILURES: Final = "failures"
"""The key, in a line of metrics, of some failures of reward functions: the sample and the error of each."""
SHOWN_FAILURES: Final = 4
"""The maximum number of failures in a line of metrics: the first of each kind, then others."""
LENGTH_LEVELS: Final = (0.1, 0.5, 0.9, 1)
"""The levels of ``response/tokens_quantiles``."""
MISMATCH_LEVELS: Final = (0.5, 0.9, 0.99, 1)
"""The levels of ``mismatch/log_prob_quantiles``."""


class Metric(NamedTuple):
    """The description of one metric."""

    unit: str
    """The unit of the number."""
    meaning: str
    """The meaning of the number, in one line."""
    kinds: tuple[str, ...] = (LEARN,)
    """The kinds of lines that have the metric."""
    listed: bool = False
    """Whether the value is a list."""
    levels: tuple[float, ...] = ()
    """The levels of a list of quantiles."""


_UPDATES = (WARM_UP, LEARN)
METRICS: Final[Mapping[str, Metric]] = MappingProxyType(
    {
        "warmup/loss": Metric("nats a token", "cross-entropy of the correct answers", (WARM_UP,)),
        "evaluation/reward": Metric(
            "reward", "mean reward of the samples that have one; null if none has", (EVALUATE,)
        ),
        "evaluation/reward_by_task": Metric(
            "reward",
            "the same for each task of a mixture, in the order of `--task`",
            (EVALUATE,),
            listed=True,
        ),
        "evaluation/pass_at_k": Metric(
            "share",
            "estimate of pass@k with k = `--evaluation.pass-at`: the probability that one of k responses to a prompt"
            " is correct; null if no prompt has k responses with rewards",
            (EVALUATE,),
        ),
        "evaluation/samples": Metric("samples", "number of samples that have a reward", (EVALUATE,)),
        "evaluation/failed": Metric(
            "samples",
            "number of samples without a reward because their reward function failed",
            (EVALUATE,),
        ),
        "reward/mean": Metric(
            "reward",
            "mean reward of the samples that have one, including those that DAPO replaces; null if none has",
        ),
        "reward/mean_by_task": Metric(
            "reward", "the same for each task of a mixture, in the order of `--task`", listed=True
        ),
        "reward/failed": Metric(
            "samples",
            "number of samples left out because their reward function failed, the sum of the next four",
        ),
        "reward/solved_by_all": Metric(
            "share",
            "share of prompts whose responses are all correct, with a reward of at least `--evaluation.correct`; in"
            " DAPO with replaced prompts; null if responses are learned from apart from others to their prompt",
        ),
        "reward/solved_by_none": Metric(
            "share", "share of prompts none of whose responses is correct; null as above"
        ),
        "reward/failed_raised": Metric(
            "samples", "those whose reward function raised, or whose task's reply did"
        ),
        "reward/failed_not_finite": Metric("samples", "those whose reward was no finite number"),
        "reward/failed_timed_out": Metric(
            "samples", "those whose reward took longer than `--reward-pool.seconds`"
        ),
        "reward/failed_process_ended": Metric("samples", "those whose reward function ended its process"),
        "reward/overlong": Metric(
            "reward", "mean length penalty subtracted from rewards before learning; null except in DAPO"
        ),
        "reward/replaced_prompts": Metric(
            "prompts",
            "number of prompts replaced because all their responses had the same reward; null except in DAPO",
        ),
        "reward/equal_prompts": Metric(
            "prompts",
            "number of prompts in the batch whose responses all had the same reward, for lack of others; null except"
            " in DAPO",
        ),
        "response/tokens": Metric(
            "tokens", "mean length of a response so far, its end included, without replies"
        ),
        "response/tokens_quantiles": Metric(
            "tokens",
            "quantiles of these lengths at 0.1, 0.5, 0.9 and 1",
            listed=True,
            levels=LENGTH_LEVELS,
        ),
        "response/longest": Metric("tokens", "length of the longest response, without replies"),
        "response/ended_share": Metric("share", "share of responses that an end token ended"),
        "response/decoding_steps": Metric(
            "tokens", "maximum number of tokens that this step added to a response"
        ),
        "response/slots_used_share": Metric(
            "share",
            "share of decoding slots (samples x decoding steps, by wave, in DAPO of all samples) that sampled a token",
        ),
        "response/turns": Metric("turns", "mean number of turns of a response; null with `--turns 1`"),
        "response/reply_tokens": Metric(
            "tokens", "mean number of tokens of all replies to a response; null with `--turns 1`"
        ),
        "response/carried": Metric(
            "samples", "number of responses that earlier rollouts began; null without windows"
        ),
        "response/unfinished": Metric(
            "samples", "number of responses that the next rollout continues; null without windows"
        ),
        "response/most_policies": Metric(
            "policies", "largest number of policies that sampled one response; null without windows"
        ),
        "rollout/staleness": Metric(
            "updates",
            "mean number of updates between the weights that sampled a token and those that learn from it; null"
            " without an engine",
        ),
        "rollout/staleness_max": Metric(
            "updates", "the largest such number, at most `--staleness`; null without an engine"
        ),
        "rollout/continued": Metric(
            "samples",
            "number of responses with tokens of several versions of the weights; null without an engine",
        ),
        "rollout/sync_seconds": Metric(
            "s", "writing the weights and waiting until servers have loaded them; null without an engine"
        ),
        "rollout/sync_bytes": Metric("bytes", "weights written for servers; null without an engine"),
        "rollout/retried": Metric(
            "requests",
            "requests repeated because an answer was bad or a server did not answer; null without an engine",
        ),
        "rollout/dropped": Metric(
            "samples", "samples left out because all their answers were bad; null without an engine"
        ),
        "rollout/filled_share": Metric(
            "share",
            "share of tokens whose route the engine did not record, and which have that of the token before; null"
            " without an engine",
        ),
        "mismatch/log_prob": Metric(
            "nats a token",
            "mean absolute difference between the log-probabilities of the rollout and of the recompute; with"
            " `--staleness` updates are between them",
        ),
        "mismatch/log_prob_older": Metric(
            "nats a token",
            "the same for tokens that earlier weights sampled, in windows or with `--staleness`; null without any",
        ),
        "mismatch/log_prob_quantiles": Metric(
            "nats a token",
            "its quantiles at 0.5, 0.9, 0.99 and 1",
            listed=True,
            levels=MISMATCH_LEVELS,
        ),
        "mismatch/log_prob_by_position": Metric(
            "nats a token",
            "its mean in each tenth of the longest response; null where no response has a token",
            listed=True,
        ),
        "mismatch/weight": Metric(
            "factor", "mean importance weight of sampled tokens; null without `--correction.kind`"
        ),
        "mismatch/bounded_share": Metric(
            "share",
            "share of sampled tokens whose weight was truncated, or that were masked; null without it",
        ),
        "policy/loss": Metric(
            "loss",
            "clipped policy loss in the last epoch; null, as all below to the norm, if an update of it was not finite",
        ),
        "policy/kl": Metric(
            "nats a token", "estimate of KL(old, new) in the last epoch, never negative: rho - 1 - log rho"
        ),
        "policy/clipped_share": Metric("share", "weight of the tokens whose ratio was clipped"),
        "policy/entropy": Metric(
            "nats a token",
            "mean entropy of the policy over the tokens that it learns from, in the last epoch, weighted as the loss",
        ),
        "policy/reference_kl": Metric(
            "nats a token",
            "estimate of the divergence from the reference in the last epoch, by `--reference.kind`, weighted as the"
            " loss; null without it",
        ),
        "policy/gradient_norm": Metric("norm", "norm of the gradient of an update, before clipping"),
        "policy/skipped": Metric(
            "updates", "number of updates that changed nothing because they were not finite", _UPDATES
        ),
        "critic/loss": Metric(
            "loss",
            "critic's loss in its last pass over the batch; null without a critic, or if it was not finite",
        ),
        "critic/explained_variance": Metric(
            "share",
            "share of the variance of the critic's targets that its values before the updates explain; null without"
            " a critic or variance",
        ),
        "critic/explained_variance_new": Metric(
            "share",
            "the same for tokens of finished responses that this step sampled; null without a critic or variance",
        ),
        "critic/explained_variance_carried": Metric(
            "share",
            "the same for tokens of finished responses that earlier steps sampled; null without such tokens",
        ),
        "critic/not_finite": Metric(
            "samples",
            "number of samples left out because the critic returned no finite number; null without a critic",
        ),
        "balance/imbalance": Metric(
            "max / mean",
            "imbalance of rank load in updates, and in a recompute under their plans; 1 is perfect",
        ),
        "balance/imbalance_recompute": Metric(
            "max / mean", "imbalance of a recompute that has its own plan or routes live; null otherwise"
        ),
        "balance/imbalance_static": Metric(
            "max / mean", "imbalance of the same batch under static placement"
        ),
        "balance/imbalance_bound": Metric(
            "max / mean", "lower bound on the imbalance of any replication with the plan's homes"
        ),
        "balance/imbalance_live": Metric(
            "max / mean",
            "imbalance of updates that route live (`--no-replay`), with experts at home; null in replay",
        ),
        "balance/imbalance_by_micro_batch": Metric(
            "max / mean", "imbalance of each micro-batch under the plan", listed=True
        ),
        "balance/imbalance_static_by_micro_batch": Metric(
            "max / mean", "imbalance of each micro-batch under static placement", listed=True
        ),
        "balance/imbalance_by_layer": Metric(
            "max / mean", "imbalance of each layer under the plan", listed=True
        ),
        "balance/imbalance_static_by_layer": Metric(
            "max / mean", "imbalance of each layer under static placement", listed=True
        ),
        "balance/load_by_rank": Metric(
            "token copies", "load of each rank under the plan, in all layers and micro-batches", listed=True
        ),
        "balance/busy_by_rank": Metric(
            "share",
            "the same as a share of the load of the busiest rank, which may be another in every layer and micro-batch;"
            " the rest is waiting for it",
            listed=True,
        ),
        "balance/crossings_per_token": Metric(
            "crossings",
            "crossings at dispatch per token and layer: of tokens, or of token copies on the flat path; 0 on one node",
        ),
        "balance/replicas": Metric(
            "replicas", "mean number of replicas on all ranks, per layer and micro-batch"
        ),
        "balance/residents": Metric("residents", "mean number of residents on all ranks, per layer"),
        "balance/pushed_by_busiest_rank": Metric(
            "experts", "experts that the busiest rank sends in one push of residents, all layers together"
        ),
        "balance/pushed_across_by_busiest_rank": Metric(
            "experts",
            "experts in such a push that a rank's share of the busiest node's link carries to other nodes",
        ),
        "buffers/fill": Metric(
            "share", "used share of the allocated rows, on the fullest rank in its fullest layer"
        ),
        "routing/changed_share": Metric(
            "share",
            "share of expert choices in which the live router differs from the record, in the last epoch",
        ),
        "routing/changed_share_by_layer": Metric("share", "the same share for each layer", listed=True),
        "batch/tokens": Metric("tokens", "tokens of prompts and responses, without padding", _UPDATES),
        "batch/tokens_run": Metric(
            "tokens",
            "tokens that the model ran on: in rollouts, with a prompt for every response, in the recompute, and in the"
            " updates of all epochs",
        ),
        "batch/fill": Metric("share", "share of the positions in the updates' sequences that hold tokens"),
        "time/step_seconds": Metric("s", "the whole step", _UPDATES),
        "time/generate_seconds": Metric("s", "generation"),
        "time/count_seconds": Metric(
            "s", "counting the ended responses for planning ahead, a part of generation; null without it"
        ),
        "time/plan_ahead_seconds": Metric(
            "s", "planning ahead: the search for homes during generation; null without it"
        ),
        "time/plan_seconds": Metric("s", "planning and checking the plan, with the wait for planning ahead"),
        "time/size_seconds": Metric("s", "computing the sizes of buffers"),
        "time/migrate_seconds": Metric(
            "s", "moving experts to their homes and samples to their ranks, and preparing layers"
        ),
        "time/recompute_seconds": Metric(
            "s", "recomputing log-probabilities, with the push of residents for it"
        ),
        "time/score_seconds": Metric("s", "scoring rewards, which runs beside planning and recompute"),
        "time/score_wait_seconds": Metric("s", "the part of scoring that the step waited for"),
        "time/update_seconds": Metric("s", "all updates from the batch", _UPDATES),
        "time/exposed_seconds": Metric("s", "delay of the step by planning, sizes and migration: see below"),
        "time/exposed_plan_seconds": Metric("s", "the part of this delay from planning"),
        "time/exposed_size_seconds": Metric("s", "the part of this delay from the sizes of buffers"),
        "time/exposed_migrate_seconds": Metric("s", "the part of this delay from migration"),
        "time/modelled_plan_seconds": Metric(
            "s",
            "modelled, not measured: recompute and updates of one epoch under the plan; null with `--price balance`",
        ),
        **{
            f"time/modelled_plan_{part}_seconds": Metric("s", f"the part of it for: {text}")
            for part, text in PARTS.items()
        },
        "time/modelled_staying_seconds": Metric(
            "s",
            "the same time at the previous homes, with samples not assigned and without replicas and residents",
        ),
        "time/modelled_balanced_seconds": Metric("s", "the same in a balanced run with uniform routing"),
        "memory/device_bytes": Metric(
            "bytes",
            "memory in use at the end of the step, on the fullest device of the first process; null where the backend"
            " does not report it, as on CPUs",
        ),
        "memory/device_peak_bytes": Metric(
            "bytes", "the most that was in use on one of them since the process began; null as above"
        ),
        "speed/tokens_per_second": Metric("tokens/s", "batch/tokens over time/step_seconds", _UPDATES),
        "speed/response_tokens_per_second": Metric(
            "tokens/s", "sampled tokens over time/generate_seconds; null with `--staleness`"
        ),
        "speed/update_tokens_per_second": Metric(
            "tokens/s", "batch/tokens of all epochs over time/update_seconds"
        ),
    }
)
"""All metrics by name."""

ALGORITHM_METRICS: Final = (
    "reward/overlong",
    "reward/replaced_prompts",
    "reward/equal_prompts",
    "response/turns",
    "response/reply_tokens",
    "response/carried",
    "response/unfinished",
    "response/most_policies",
    "mismatch/log_prob_older",
    "mismatch/weight",
    "mismatch/bounded_share",
    "policy/reference_kl",
    "rollout/staleness",
    "rollout/staleness_max",
    "rollout/continued",
    "rollout/sync_seconds",
    "rollout/sync_bytes",
    "rollout/retried",
    "rollout/dropped",
    "rollout/filled_share",
    "critic/loss",
    "critic/explained_variance",
    "critic/explained_variance_new",
    "critic/explained_variance_carried",
    "critic/not_finite",
)
"""The metrics of some algorithms, engines or several turns only, null in the lines of the others."""


def names_of(kind: str) -> frozenset[str]:
    """Return the names of the metrics that a line of this kind has."""
    return frozenset(name for name, metric in METRICS.items() if kind in metric.kinds)


def scalars_of(line: Mapping[str, Any]) -> dict[str, int | float]:
    """Select the numbers of a line, without null. A quantile is a number with its level in its name.

    >>> scalars_of({"kind": "learn", "reward/mean": None, "policy/kl": 0.5, "response/tokens_quantiles": [2, 3, 5, 8]})
    ... # doctest: +NORMALIZE_WHITESPACE
    {'response/tokens_quantiles/0.1': 2, 'response/tokens_quantiles/0.5': 3, 'response/tokens_quantiles/0.9': 5,
     'response/tokens_quantiles/1': 8, 'policy/kl': 0.5}
    """
    numbers: dict[str, int | float] = {}
    for name, metric in METRICS.items():
        value = line.get(name)
        if value is None or (metric.listed and not metric.levels):
            continue
        if metric.levels:
            numbers |= {f"{name}/{level}": each for level, each in zip(metric.levels, value, strict=True)}
        else:
            numbers[name] = value
    return numbers


def lists_of(line: Mapping[str, Any]) -> dict[str, list[int | float | None]]:
    """Select the lists of a line, apart from quantiles.

    >>> lists_of({"kind": "learn", "policy/kl": 0.5, "routing/changed_share_by_layer": [0.1]})
    {'routing/changed_share_by_layer': [0.1]}
    """
    return {
        name: line[name]
        for name, metric in METRICS.items()
        if metric.listed and not metric.levels and line.get(name) is not None
    }
