"""Expert selection and gates from router logits: one formula, and a table of the settings of published models.

Write ``s`` for a token's logits, and ``u = s`` (softmax) or ``u = log sigmoid(s)`` (sigmoid): the logarithm of
each expert's score, up to a constant. Then

    chosen       the K experts with the largest score, plus correction bias if there is one
    gates        softmax(u over the chosen) * scale          scores renormalised over the chosen
                 score at the chosen * scale                 where they are not renormalised
    probability  softmax(u over all experts)                 scores renormalised over all experts

With this formula, a softmax over all experts renormalised over the chosen (Qwen3) equals a softmax over the chosen
(GPT-OSS). No gate is a quotient of two underflowed numbers, as it could be for replayed experts to which the live
router now gives tiny scores. Biases that correct the selection never enter a gate (DeepSeek-V3 report,
arXiv:2412.19437, section 2.1.2).

**Auxiliary loss.** With ``c_e`` the token copies of expert e in the whole batch and T = sum_e c_e / K its tokens, the
load-balancing loss of Switch (arXiv:2101.03961, equation 4), normalised as by DeepSeek to be 1 for even loads, is

    aux = E * sum_e f_e P_e      f_e = c_e / sum_e c_e      P_e = 1/T * sum_t probability_te

``f`` has no gradient, and with replay it is known before the first micro-batch. aux is therefore a sum of terms that
depend on one token each: the shares of the micro-batches add up to the loss of the whole batch, and so do their
gradients, for every assignment of samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Integer

from relibra_jax.contract.types import EMPTY, Array
from relibra_jax.support.argument_types import checks_arguments


@checks_arguments
@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Gating:
    """The rule by which a model selects experts and computes gates. Hashable and static under jit.

    `GATINGS` has the rules of published models.

    Args:
        top_k: K, the number of experts of a token.
        scores: ``softmax`` over all experts, or a ``sigmoid`` for each expert.
        normalise: whether the gates of a token are divided by their sum (``norm_topk_prob``).
        scale: the factor of all gates (``routed_scaling_factor``).
        router_bias: whether the router has a bias, which enters the logits and therefore the gates.
        correction_bias: whether a bias is added to the sigmoid scores, for the selection only.
        expert_groups: the number of groups into which the experts are divided (``n_group``).
        top_expert_groups: the number of groups that a token uses (``topk_group``): those whose two best experts have
            the largest sum of scores.

    Raises:
        ValueError: if ``top_k`` is below 1, ``scores`` is unknown, softmax scores have groups or a correction bias, or
            a token uses more groups than there are.

    >>> import dataclasses
    >>> dataclasses.replace(GATINGS["qwen3-moe"], top_k=2).scores
    'softmax'
    """

    top_k: int
    scores: str
    normalise: bool = True
    scale: float = 1.0
    router_bias: bool = False
    correction_bias: bool = False
    expert_groups: int = 1
    top_expert_groups: int = 1

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores={self.scores!r} must be 'softmax' or 'sigmoid'")
        if self.scores == "softmax" and (self.correction_bias or self.expert_groups != 1):
            raise ValueError(
                f"scores='softmax' with correction_bias={self.correction_bias} and expert_groups={self.expert_groups}:"
                " only sigmoid scores can have a correction bias or groups"
            )
        if not 1 <= self.top_expert_groups <= self.expert_groups:
            raise ValueError(
                f"top_expert_groups={self.top_expert_groups} must be in 1..expert_groups={self.expert_groups}"
            )


GATINGS: Final[Mapping[str, Gating]] = MappingProxyType(
    {
        "qwen3-moe": Gating(top_k=8, scores="softmax"),
        "glm-4.5": Gating(top_k=8, scores="sigmoid", correction_bias=True, scale=2.5),
        "glm-4.5-air": Gating(top_k=8, scores="sigmoid", correction_bias=True),
        "deepseek-v3": Gating(
            top_k=8, scores="sigmoid", correction_bias=True, scale=2.5, expert_groups=8, top_expert_groups=4
        ),
        "gpt-oss": Gating(top_k=4, scores="softmax", router_bias=True),
    }
)
"""The gating of published models, from their configurations and inference code."""


def check_gating(gating: Gating, num_experts: int) -> None:
    """Raise unless a model with ``num_experts`` experts can have this gating.

    Raises:
        ValueError: if the experts do not divide evenly into the groups, a group has only one expert, or a token uses
            more experts than its groups have.

    >>> check_gating(GATINGS["gpt-oss"], 2)
    Traceback (most recent call last):
    ValueError: top_k=4 is more than the 2 experts that a token may use
    """
    if num_experts % gating.expert_groups:
        raise ValueError(
            f"{num_experts} experts must divide evenly into expert_groups={gating.expert_groups}"
        )
    per_group = num_experts // gating.expert_groups
    if gating.expert_groups > 1 and per_group < 2:
        raise ValueError(
            f"expert_groups={gating.expert_groups} has {per_group} expert in each group, but the selection compares the"
            " two best experts of each group"
        )
    usable = gating.top_expert_groups * per_group
    if gating.top_k > usable:
        raise ValueError(f"top_k={gating.top_k} is more than the {usable} experts that a token may use")


@checks_arguments
def select_experts(
    logits: Float[Array, "*tokens E"], gating: Gating, *, bias: Float[Array, " E"] | None = None
) -> Int[jax.Array, "*tokens K"]:
    """Select the experts of each token by the live router's logits.

    Args:
        logits: the router's logits, including the router bias if there is one.
        gating: the rule by which the model selects experts.
        bias: the correction bias of each expert, added to its sigmoid score.

    Returns:
        int32 logical expert ids, best first. Of equal scores the lower id comes first, so that every process selects
        the same experts.

    Raises:
        ValueError: under the conditions of `check_gating`, or if ``bias`` is given without ``correction_bias`` or
            missing with it.

    >>> gating = Gating(top_k=2, scores="sigmoid", correction_bias=True)
    >>> select_experts(jnp.array([0.0, 1.0, 1.0]), gating, bias=jnp.array([1.0, 0.0, 0.0])).tolist()
    [0, 1]
    """
    num_experts = logits.shape[-1]
    check_gating(gating, num_experts)
    if (bias is not None) != gating.correction_bias:
        raise ValueError(
            f"correction_bias={gating.correction_bias}, but {'no' if bias is None else 'a'} bias is given"
        )
    scores = jax.lax.stop_gradient(_wide(logits))
    if gating.scores == "sigmoid":
        scores = jax.nn.sigmoid(scores)
    if bias is not None:
        scores = scores + jnp.broadcast_to(bias, scores.shape)
    if gating.expert_groups > 1:
        grouped = scores.reshape(*scores.shape[:-1], gating.expert_groups, -1)
        best = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(-1), gating.top_expert_groups)[1]
        usable = jax.nn.one_hot(best, gating.expert_groups, dtype=bool).any(-2)
        scores = jnp.where(usable[..., None], grouped, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(scores, gating.top_k)[1]


@checks_arguments
def gates_at(
    logits: Float[Array, "*tokens E"], expert_ids: Integer[Array, "*tokens K"], gating: Gating
) -> Float[jax.Array, "*tokens K"]:
    """Compute the gates of given experts from the live router's logits, so that the router learns from replayed ids.

    Args:
        logits: the router's logits, including the router bias if there is one; differentiable.
        expert_ids: the experts of each token, in any integer dtype; EMPTY for none.
        gating: the rule by which the model computes gates.

    Returns:
        The gates in float32 (float64 for float64 logits); 0 and without a gradient where the id is EMPTY.

    >>> gates_at(jnp.zeros((2, 4)), jnp.array([[3, 0], [-1, -1]]), GATINGS["qwen3-moe"]).tolist()
    [[0.5, 0.5], [0.0, 0.0]]
    """
    ids = jnp.asarray(expert_ids, jnp.int32)
    chosen = ids != EMPTY
    scores = _log_scores(logits, gating)
    if not gating.normalise and gating.scores == "softmax":
        scores = jax.nn.log_softmax(scores)
    scores = jnp.take_along_axis(scores, jnp.maximum(ids, 0), axis=-1)
    if gating.normalise:
        # The minimum is finite, so that a token with only EMPTY ids divides by K here and not by zero.
        gates = jax.nn.softmax(jnp.where(chosen, scores, jnp.finfo(scores.dtype).min))
    else:
        gates = jnp.exp(scores)
    return jnp.where(chosen, gates * gating.scale, 0)


@checks_arguments
def balance_loss(
    logits: Float[Array, "*tokens E"],
    batch_load: Integer[Array, " E"],
    gating: Gating,
    *,
    mask: Bool[Array, "*tokens"] | None = None,
) -> Float[jax.Array, ""]:
    """Compute one micro-batch's share of a layer's load-balancing loss over the whole batch.

    The docstring of `relibra_jax.execution.gating` has the formula. The shares of all micro-batches of an update, on
    all data-parallel groups, add up to the loss; do not average them.

    Args:
        logits: the router's logits of one micro-batch; differentiable.
        batch_load: token copies of each expert in the whole batch, over all data-parallel groups:
            ``load[:, layer].sum((0, 1, 2))`` for ``load[M, L, N, G, E]``.
        gating: the gating of the model.
        mask: True for real tokens. None for no padding.

    Returns:
        The share, a scalar.

    >>> even = jnp.array([4, 4]), GATINGS["gpt-oss"]
    >>> round(2 * float(balance_loss(jnp.zeros((1, 2)), *even)), 6)  # 8 copies of 4 a token: 2 tokens
    1.0
    """
    probability = jax.nn.softmax(_log_scores(logits, gating))
    load = jnp.asarray(batch_load, probability.dtype)
    copies = jnp.maximum(load.sum(), 1)
    if mask is not None:
        probability = jnp.where(mask[..., None], probability, 0)
    total = probability.sum(tuple(range(probability.ndim - 1)))
    return load.size * jnp.dot(load / copies, total) * (gating.top_k / copies)


def _wide(logits: Float[Array, "..."]) -> Float[jax.Array, "..."]:
    return jnp.asarray(logits, jnp.promote_types(logits.dtype, jnp.float32))


def _log_scores(logits: Float[Array, "..."], gating: Gating) -> Float[jax.Array, "..."]:
    """Return the logarithms of the scores, up to a constant for each token: ``u`` in the module's docstring."""
    logits = _wide(logits)
    return jax.nn.log_sigmoid(logits) if gating.scores == "sigmoid" else logits
