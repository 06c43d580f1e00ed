"""The loss of a policy that learns from responses: its clipped gain, with terms of entropy and of a reference.

    loss = policy - entropy factor * sum_t w_t H_t + reference factor * sum_t w_t k(d_t)

with the weights w_t of the policy loss (`experiments.rl.losses`), the entropy H_t of the distribution from which token
t was drawn, and the divergence k of `experiments.rl.reference`. All terms are sums over tokens, so they do not depend
on how samples are assigned.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from experiments.rl.losses import Clip, PolicyLoss, TokenResponses, policy_loss
from experiments.rl.reference import Reference, reference_kl
from relibra_jax.contract.types import Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Losses:
    """The losses of learning from responses. Equal settings share compiled programs."""

    kind: str = "clip"
    """The policy loss, one of `experiments.rl.losses.LOSSES`."""
    clip: Clip = dataclasses.field(default_factory=Clip)
    """The bounds of its ratios."""
    entropy: float = 0.0
    """The factor of the entropy, whose bonus is subtracted from the loss."""
    reference: Reference = dataclasses.field(default_factory=Reference)
    """The divergence from the reference."""
    temperature: float = 1.0
    """The sampling temperature of the responses."""
    num_samples: int = 0
    """B, the number of samples of the batch, for ``gspo``."""


class Terms(NamedTuple):
    """The terms of the loss before their factors, as shares of one micro-batch that add up to those of the batch."""

    policy: PolicyLoss
    """The policy loss and its statistics. Supervised learning has only the loss."""
    entropy: Float[Array, ""] | None = None
    """The weighted sum of the entropies of tokens. None in supervised learning."""
    reference_kl: Float[Array, ""] | None = None
    """The divergence from the reference. None without one."""


def policy_terms(
    log_probs: Float[Array, "*samples T"],
    entropies: Float[Array, "*samples T"],
    old_log_probs: Float[Array, "*samples T"],
    advantages: Float[Array, "*samples T"],
    weights: Float[Array, "*samples T"],
    reference_log_probs: Float[Array, "*samples T"] | None = None,
    *,
    losses: Losses,
    responses: TokenResponses | None = None,
) -> tuple[Float[jax.Array, ""], Terms]:
    """Compute the loss of a policy, and its terms.

    Args:
        log_probs: the log-probabilities of the tokens under the current policy. Gradients flow through them.
        entropies: the entropies of the distributions from which the tokens were drawn, under the same policy. Gradients
            flow through them.
        old_log_probs: the log-probabilities of the same tokens under the policy before the updates.
        advantages: the advantages of the tokens.
        weights: the weights of the tokens, as `experiments.rl.losses.token_weights` returns them.
        reference_log_probs: the log-probabilities of the same tokens under the reference. None without one.
        losses: the kinds of losses, and their factors.
        responses: the response of each token, for ``gspo``.

    Returns:
        The loss, and its terms.

    >>> log_probs, entropies, old_log_probs = jnp.array([[-1.0]]), jnp.array([[2.0]]), jnp.array([[-1.0]])
    >>> advantages, weights = jnp.array([[0.5]]), jnp.array([[1.0]])
    >>> loss, terms = policy_terms(log_probs, entropies, old_log_probs, advantages, weights, losses=Losses(entropy=0.1))
    >>> round(float(loss), 3), float(terms.entropy)
    (-0.7, 2.0)
    """
    policy = policy_loss(
        *(log_probs, old_log_probs, advantages, weights),
        clip=losses.clip,
        kind=losses.kind,
        responses=responses,
    )
    entropy = jnp.sum(weights * jnp.where(weights > 0, entropies, 0))
    # Without a bonus the metric alone needs the entropy, and the backward pass nothing of it.
    entropy = entropy if losses.entropy else jax.lax.stop_gradient(entropy)
    loss = jnp.asarray(policy.loss - losses.entropy * entropy)
    if reference_log_probs is None:
        return loss, Terms(policy, entropy)
    divergence = reference_kl(log_probs, reference_log_probs, weights, kind=losses.reference.kind)
    return jnp.asarray(loss + losses.reference.factor * divergence), Terms(policy, entropy, divergence)
