"""The metrics of runs: every name that they write, with its unit and its meaning.

The names are an interface, which dashboards and scripts rely on: a line of a kind has all names of its kind and no
others. docs/guides/metrics.md shows the same list.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

WARM_UP, LEARN, EVALUATE = "warm-up", "learn", "evaluation"
"""The kinds of lines: a supervised update, a batch of responses that is learned from, an evaluation."""
FAILURES: Final = "failures"
"""Beside the metrics of a line: what the first reward functions that failed were given, and how they failed."""


class Metric(NamedTuple):
    """One metric."""

    unit: str
    """What the number counts."""
    meaning: str
    """What it says, in one line."""
    kinds: tuple[str, ...] = (LEARN,)
    """The kinds of lines that have it."""
    listed: bool = False
    """Whether the value is a list, for JSON lines alone."""


_UPDATES = (WARM_UP, LEARN)

METRICS: Final[Mapping[str, Metric]] = MappingProxyType(
    {
        "warmup/loss": Metric("nats a token", "cross-entropy of the right answers", (WARM_UP,)),
        "evaluation/reward": Metric(
            "reward", "mean over the samples that have one; null without any", (EVALUATE,)
        ),
        "evaluation/samples": Metric("samples", "those that have a reward", (EVALUATE,)),
        "evaluation/failed": Metric(
            "samples", "those whose reward function raised or returned no finite number", (EVALUATE,)
        ),
        "reward/mean": Metric(
            "reward",
            "mean over the samples that have one, those that DAPO replaces among them; null without any",
        ),
        "reward/failed": Metric(
            "samples", "masked: their reward function raised or returned no finite number"
        ),
        "reward/overlong": Metric(
            "reward",
            "mean of what responses lost for their length before they were learned from; null but in DAPO",
        ),
        "reward/replaced_prompts": Metric(
            "prompts",
            "whose responses all had the same reward, and which others have replaced; null but in DAPO",
        ),
        "reward/equal_prompts": Metric(
            "prompts",
            "whose responses all had the same reward, and which the batch has for want of others; null but in DAPO",
        ),
        "response/tokens": Metric("tokens", "mean length of a response so far, its end included"),
        "response/longest": Metric("tokens", "length of the longest response"),
        "response/ended_share": Metric("share", "responses that ended before the room for them did"),
        "response/decoding_steps": Metric("tokens", "that this step added to the response it added most to"),
        "response/slots_used_share": Metric(
            "share", "of all samples times the decoding steps, those that sampled a token"
        ),
        "response/carried": Metric("samples", "responses that earlier rollouts began; null but in T-PPO"),
        "response/unfinished": Metric(
            "samples", "responses that the next rollout goes on with; null but in T-PPO"
        ),
        "response/most_policies": Metric(
            "policies", "that have sampled tokens of the longest response; null but in T-PPO"
        ),
        "policy/loss": Metric("loss", "clipped policy loss of the batch's last update"),
        "policy/kl": Metric(
            "nats a token", "estimate of KL(old, new) in the last update, never negative: rho - 1 - log rho"
        ),
        "policy/clipped_share": Metric("share", "weight of the tokens whose ratio the clip cut off"),
        "policy/gradient_norm": Metric("norm", "of the batch's gradient, before it is cut"),
        "critic/loss": Metric("loss", "of the batch's last update, before its factor; null without a critic"),
        "critic/explained_variance": Metric(
            "share",
            "of the variance of what the critic learns, that its values explain before; null without any",
        ),
        "critic/not_finite": Metric(
            "samples", "masked: the critic returned no finite number for them; null without a critic"
        ),
        "balance/imbalance": Metric(
            "max / mean", "rank load in updates, and in a recompute under their plans; 1 is perfect"
        ),
        "balance/imbalance_recompute": Metric(
            "max / mean", "of a recompute in micro-batches of its own, or of one that routes live; else null"
        ),
        "balance/imbalance_static": Metric("max / mean", "the same batch under static placement"),
        "balance/imbalance_bound": Metric("max / mean", "what no replication with the plan's homes is below"),
        "balance/imbalance_live": Metric(
            "max / mean", "of an update that routes anew (`--no-replay`), experts at home; null in replay"
        ),
        "balance/imbalance_by_micro_batch": Metric(
            "max / mean", "under the plan, of each micro-batch", listed=True
        ),
        "balance/imbalance_static_by_micro_batch": Metric(
            "max / mean", "under static placement, of each micro-batch", listed=True
        ),
        "balance/crossings_per_token": Metric(
            "crossings",
            "to other nodes at dispatch, for a token in a layer: tokens, or copies on the flat path",
        ),
        "balance/replicas": Metric("replicas", "of all ranks in a layer and micro-batch, mean"),
        "balance/residents": Metric("residents", "of all ranks in a layer, mean"),
        "balance/pushed_by_busiest_rank": Metric(
            "experts", "that one rank gives away in a push of residents, all layers together"
        ),
        "balance/pushed_across_by_busiest_rank": Metric(
            "experts", "of these pushes, what one rank's share of its node's link carries to other nodes"
        ),
        "buffers/fill": Metric(
            "share", "rows used of the rows allocated, on the fullest rank in its fullest layer"
        ),
        "routing/changed_share": Metric(
            "share", "expert choices in which the live router differs from the record, in the last update"
        ),
        "routing/changed_share_by_layer": Metric("share", "the same, of each layer", listed=True),
        "batch/tokens": Metric("tokens", "prompts and responses, without padding", _UPDATES),
        "batch/tokens_run": Metric(
            "tokens",
            "that the model was run on: in rollouts, in the recompute, and in the updates of all epochs",
        ),
        "batch/fill": Metric("share", "positions of the updates' rows that hold tokens"),
        "time/step_seconds": Metric("s", "the whole step", _UPDATES),
        "time/generate_seconds": Metric("s", "generation"),
        "time/count_seconds": Metric(
            "s", "of generation, counting the responses that have ended for a search ahead; null without one"
        ),
        "time/plan_ahead_seconds": Metric(
            "s", "a search for homes beside the rollout, from responses that had ended; null without one"
        ),
        "time/plan_seconds": Metric("s", "the plan and its check, and what it waits for a search ahead"),
        "time/size_seconds": Metric("s", "the sizes of buffers"),
        "time/migrate_seconds": Metric(
            "s", "experts to their homes, samples to their ranks, layers prepared"
        ),
        "time/recompute_seconds": Metric(
            "s", "log-probabilities recomputed, residents pushed for them among it"
        ),
        "time/score_seconds": Metric("s", "rewards, scored beside planning and recompute"),
        "time/score_wait_seconds": Metric("s", "the part of scoring that the step waited for"),
        "time/update_seconds": Metric("s", "all updates from the batch", _UPDATES),
        "time/exposed_seconds": Metric("s", "by which plan, sizes and migration delayed the step: see below"),
        "time/exposed_plan_seconds": Metric("s", "of these, planning"),
        "time/exposed_size_seconds": Metric("s", "of these, the sizes of buffers"),
        "time/exposed_migrate_seconds": Metric("s", "of these, migration"),
        "speed/tokens_per_second": Metric("tokens/s", "batch/tokens over time/step_seconds", _UPDATES),
        "speed/response_tokens_per_second": Metric("tokens/s", "sampled tokens over time/generate_seconds"),
        "speed/update_tokens_per_second": Metric(
            "tokens/s", "batch/tokens of all epochs over time/update_seconds"
        ),
    }
)


OF_ALGORITHMS: Final = (
    *("reward/overlong", "reward/replaced_prompts", "reward/equal_prompts"),
    *("response/carried", "response/unfinished", "response/most_policies"),
    *("critic/loss", "critic/explained_variance", "critic/not_finite"),
)
"""The metrics that only some algorithms have, null in the lines of the others."""


def names_of(kind: str) -> frozenset[str]:
    """The metrics that a line of this kind has."""
    return frozenset(name for name, metric in METRICS.items() if kind in metric.kinds)


def scalars_of(line: Mapping[str, Any]) -> dict[str, int | float]:
    """What writers are given of a line: its metrics that are numbers, without those that are null in it.

    >>> scalars_of({"kind": "learn", "reward/mean": None, "policy/kl": 0.5, "routing/changed_share_by_layer": [0.1]})
    {'policy/kl': 0.5}
    """
    return {
        name: line[name]
        for name, metric in METRICS.items()
        if not metric.listed and line.get(name) is not None
    }


def metrics_table() -> str:
    """The list as a table in Markdown, for docs/guides/metrics.md."""
    head = ["| name | unit | meaning | lines |", "|---|---|---|---|"]
    rows = []
    for name, metric in METRICS.items():
        unit = f"{metric.unit}, a list" if metric.listed else metric.unit
        rows.append(f"| `{name}` | {unit} | {metric.meaning} | {', '.join(metric.kinds)} |")
    return "\n".join([*head, *rows])
