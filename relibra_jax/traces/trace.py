"""A trace: routing replay, and what is known of where it came from."""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from relibra_jax.types import RoutingReplay

ONE_DOMAIN: Final = "all"
"""The domain of every sample where nothing is known of them."""


class Trace(NamedTuple):
    """Routing replay and what is known of where it came from; `make_trace` builds one."""

    replay: RoutingReplay
    """The experts that every token used."""
    num_experts: int
    """The logical experts of a layer."""
    name: str
    """The trace's name in tables and figures."""
    note: str
    """What a reader has to know to judge the numbers; empty for nothing."""
    domain: Int[np.ndarray, " B"]
    """The domain of each sample, an index into ``domains``: what kind of prompt it answers."""
    domains: tuple[str, ...]
    """The names of the domains."""
    synthetic: bool
    """Whether the routing was drawn by a generator rather than recorded from a model."""


def make_trace(
    replay: RoutingReplay,
    num_experts: int,
    name: str,
    note: str = "",
    *,
    category: Shaped[np.ndarray, " B"] | None = None,
    synthetic: bool = False,
) -> Trace:
    """Build a trace whose domains are the categories of its samples.

    Args:
        replay: the experts that every token used.
        num_experts: the logical experts E of a layer.
        name: the trace's name in tables and figures.
        note: what a reader has to know to judge the numbers.
        category: the name of each sample's domain. None puts all samples into one domain.
        synthetic: whether a generator drew the routing.

    Returns:
        The trace; its domains are in the order of their names.

    >>> replay = RoutingReplay(np.zeros((3, 1, 1, 1), np.uint8), np.ones((3, 1), bool))
    >>> trace = make_trace(replay, 4, "small", category=np.array(["maths", "code", "maths"]))
    >>> trace.domains, trace.domain.tolist()
    (('code', 'maths'), [1, 0, 1])
    """
    category = np.full(len(replay.mask), ONE_DOMAIN) if category is None else category
    names, domain = np.unique(category, return_inverse=True)
    domains = tuple(map(str, names))
    return Trace(replay, num_experts, name, note, domain.astype(np.int32), domains, synthetic)
