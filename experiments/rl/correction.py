"""Importance weights of tokens that were sampled under other log-probabilities than those that losses start from.

The recompute gives every token the log-probability log p_old that losses take for the old policy. It was sampled with
another one, log q, if the engine computes in lower precision, if other experts ran, or if older weights sampled it.
With the ratio r = p_old / q, the gradient of a token is multiplied by

    min(r, high)                      truncate: truncated importance sampling (TIS)
    r if low <= r <= high, else 0     mask: IcePop (Ring-1T, arXiv:2510.18855, with the bounds 0.5 and 5)

The weight has no gradient of its own, so it multiplies the advantage. Masked tokens are not learned from: they do not
count in the means of losses either.
"""

import dataclasses
from typing import Final

import numpy as np
from jaxtyping import Bool, Float

from experiments.rl.losses import LARGEST_LOG_RATIO
from relibra_jax.contract.types import Array
from relibra_jax.support.limits import check_not_negative, check_positive
from relibra_jax.support.suggestions import suggest_names

KINDS: Final = ("none", "truncate", "mask")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction:
    """The importance weights of tokens whose log-probability in the rollout differs from that of the recompute.

    Raises:
        ValueError: if the kind is unknown, or a bound is out of its range.
    """

    kind: str = "none"
    """none, truncate (TIS) or mask (IcePop)."""
    low: float = 0.5
    """The ratio below which ``mask`` leaves a token out."""
    high: float = 2.0
    """The largest weight of ``truncate``, and the ratio above which ``mask`` leaves a token out."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"correction.kind {self.kind!r} must be one of {', '.join(KINDS)}{suggest_names(self.kind, KINDS)}"
            )
        check_not_negative("correction.low", self.low)
        check_positive("correction.high", self.high)
        unused = {"none": ("low", "high"), "truncate": ("low",), "mask": ()}[self.kind]
        for name in unused:
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"correction.{name}={getattr(self, name)} is not used by correction.kind={self.kind}"
                )
        if self.low >= self.high:
            raise ValueError(f"correction.low={self.low} must be below correction.high={self.high}")


def importance_weights(
    old_log_probs: Float[Array, "B T"], sampled_log_probs: Float[Array, "B T"], correction: Correction
) -> Float[np.ndarray, "B T"]:
    """Compute the weight of every token; the formulas are at the top of the file.

    Args:
        old_log_probs: the log-probabilities of the recompute.
        sampled_log_probs: the log-probabilities under which the tokens were sampled.
        correction: the kind of weights, and their bounds.

    Returns:
        The weights, float32. 1 for the kind ``none``, and 0 where a log-probability is not finite.

    >>> old, sampled = np.log([[0.5, 0.5, 0.5]]), np.log([[0.5, 0.1, 0.9]])
    >>> importance_weights(old, sampled, Correction(kind="truncate")).astype(float).round(2).tolist()
    [[1.0, 2.0, 0.56]]
    >>> importance_weights(old, sampled, Correction(kind="mask", low=0.6)).astype(float).round(2).tolist()
    [[1.0, 0.0, 0.0]]
    """
    log_ratio = np.asarray(old_log_probs, np.float64) - np.asarray(sampled_log_probs, np.float64)
    if correction.kind == "none":
        return np.ones(log_ratio.shape, np.float32)
    finite = np.isfinite(log_ratio)
    ratio = np.exp(np.clip(np.where(finite, log_ratio, 0), -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    if correction.kind == "truncate":
        weights = np.minimum(ratio, correction.high)
    else:
        weights = np.where((ratio >= correction.low) & (ratio <= correction.high), ratio, 0)
    return np.where(finite, weights, 0).astype(np.float32)


def measure_correction(
    weights: Float[np.ndarray, "B T"], mask: Bool[Array, "B T"], correction: Correction
) -> dict[str, float | None]:
    """Compute the metrics of the weights of sampled tokens. Without a correction there are none."""
    if correction.kind == "none" or not mask.any():
        return {}
    used = weights[mask]
    bound = correction.high if correction.kind == "truncate" else 0.0
    return {
        "mismatch/weight": float(used.mean()),
        "mismatch/bounded_share": float((used == np.float32(bound)).mean()),
    }
