"""The reference: the weights from which learning starts, and the divergence that keeps the policy near them.

With the bounded log-ratio d_t = log p_t - log ref_t of a token that the policy sampled, the estimators of KL(p, ref)
are (John Schulman, http://joschu.net/blog/kl-approx.html)

    k1    d_t                      has the right mean, and is negative for some tokens
    k2    d_t^2 / 2                never negative; its gradient d_t grad log p_t has the right mean
    k3    exp(-d_t) - 1 + d_t      never negative and with the right mean; GRPO's (arXiv:2402.03300). The mean of its
                                   gradient is that of KL(ref, p)

The loss gets ``factor`` times their weighted sum over the tokens that are learned from. The mean of k1's own gradient,
grad log p_t, is 0 whatever the policy is, so k1 has the value of k1 and the gradient of k2.
"""

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from experiments.rl.losses import bound_log_ratio
from relibra_jax.contract.types import Array
from relibra_jax.execution.memory import HOST, MEMORY_KINDS
from relibra_jax.support.limits import check_positive
from relibra_jax.support.suggestions import suggest_names

KINDS: Final = ("none", "k1", "k2", "k3")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """The divergence from the weights with which learning starts: after the warm-up, or those of ``model``.

    Raises:
        ValueError: if a name is unknown, the factor is not positive, or a setting is given without a kind.
    """

    kind: str = "none"
    """The estimator of the divergence: none, k1, k2 or k3 (GRPO). Without one, a run keeps no reference."""
    factor: float = 0.0
    """The factor of the divergence in the loss."""
    memory: str = HOST
    """The memory of the reference between its passes: device or pinned_host."""

    def __post_init__(self) -> None:
        for name, table in (("kind", KINDS), ("memory", MEMORY_KINDS)):
            value = getattr(self, name)
            if value not in table:
                hint = suggest_names(value, table)
                raise ValueError(f"reference.{name} {value!r} must be one of {', '.join(table)}{hint}")
        if self.kind != "none":
            check_positive("reference.factor", self.factor)
            return
        for name in ("factor", "memory"):
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"reference.{name}={getattr(self, name)} is not used by reference.kind=none")


def reference_kl(
    log_probs: Float[Array, "*samples T"],
    reference_log_probs: Float[Array, "*samples T"],
    weights: Float[Array, "*samples T"],
    *,
    kind: str,
) -> Float[jax.Array, ""]:
    """Estimate the divergence of the policy from the reference; the formulas are at the top of the file.

    Args:
        log_probs: the log-probabilities of the tokens under the current policy. Gradients flow through them.
        reference_log_probs: the log-probabilities of the same tokens under the reference.
        weights: the weights of the tokens, from `experiments.rl.losses.token_weights`.
        kind: one of `KINDS` but none.

    Returns:
        The weighted sum of the estimates, float32. Tokens whose log-ratio is beyond the bound have no gradient.

    >>> log_probs, reference_log_probs, weights = jnp.array([[-1.0]]), jnp.array([[-2.0]]), jnp.array([[1.0]])
    >>> [round(float(reference_kl(log_probs, reference_log_probs, weights, kind=kind)), 3) for kind in KINDS[1:]]
    [1.0, 0.5, 0.368]
    """
    difference = jnp.asarray(log_probs) - jax.lax.stop_gradient(reference_log_probs)
    difference = bound_log_ratio(jnp.where(weights > 0, difference, 0))
    squared = jnp.square(difference) / 2
    estimates = {
        "k1": squared + jax.lax.stop_gradient(difference - squared),
        "k2": squared,
        "k3": jnp.exp(-difference) - 1 + difference,
    }
    return (weights * estimates[kind]).sum()


def copy_weights[T: nnx.Module](model: T, memory: str) -> T:
    """Copy a model's weights as they are now, in the dtypes of the computation, with experts at the same homes.

    Args:
        model: the model, with parameters in the memory of host or devices.
        memory: the memory of the copy, one of `relibra_jax.execution.memory.MEMORY_KINDS`.

    Returns:
        A model of its own, which shares no array with ``model`` and moves with it as one of the copies of
        `relibra_jax.nnx.Balancer.prepare_stages`.
    """
    copy = nnx.clone(model)
    for _, variable in nnx.iter_graph(copy):
        if isinstance(variable, nnx.Variable):
            leaf = variable.get_raw_value()
            kind, dtype = leaf.sharding.memory_kind, leaf.dtype
            if isinstance(variable, nnx.Param):
                kind, dtype = memory, variable.get_metadata("compute_dtype", None) or dtype
            on_devices = jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
            cast = jnp.array(on_devices, dtype, copy=True)
            variable.set_value(jax.device_put(cast, leaf.sharding.with_memory_kind(kind)))
    return copy
