"""Traces: a routing replay with its name, its source and the domains of its samples."""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int, Integer, Shaped

from relibra_jax.contract.recording import Recording
from relibra_jax.contract.types import RoutingReplay

ONE_DOMAIN: Final = "all"
"""The domain of every sample of a trace without domains."""


class Trace(NamedTuple):
    """A routing replay with its name, its source and the domains of its samples; `make_trace` builds one."""

    replay: RoutingReplay
    """The experts that every token used."""
    num_experts: int
    """E, the number of logical experts of a layer."""
    name: str
    """The trace's name in tables and figures."""
    note: str
    """A remark that readers need to judge the numbers; empty for none."""
    domain: Int[np.ndarray, " B"]
    """The domain of each sample (the kind of its prompt), as an index into ``domains``."""
    domains: tuple[str, ...]
    """The names of the domains."""
    synthetic: bool
    """True if a generator drew the routing, False if it was recorded from a model."""
    token_ids: Integer[np.ndarray, "B T"] | None = None
    """The vocabulary id of every token, for predictors that know it; None if the trace has none."""
    recording: Recording = Recording()
    """What the run that made the trace recorded of its samples: steps, rewards, versions and provenance, if any."""


def make_trace(
    replay: RoutingReplay,
    num_experts: int,
    name: str,
    note: str = "",
    *,
    category: Shaped[np.ndarray, " B"] | None = None,
    synthetic: bool = False,
    token_ids: Integer[np.ndarray, "B T"] | None = None,
    recording: Recording = Recording(),  # noqa: B008
) -> Trace:
    """Build a trace whose domains are the categories of its samples.

    Args:
        replay: the experts that every token used.
        num_experts: E, the number of logical experts of a layer.
        name: the trace's name in tables and figures.
        note: a remark that readers need to judge the numbers.
        category: the name of each sample's domain. None puts all samples into one domain.
        synthetic: True if a generator drew the routing.
        token_ids: the vocabulary id of every token, if it is known.
        recording: what a run recorded of the samples.

    Returns:
        The trace. Its domains are sorted by name.

    >>> replay = RoutingReplay(np.zeros((3, 1, 1, 1), np.uint8), np.ones((3, 1), bool))
    >>> trace = make_trace(replay, 4, "small", category=np.array(["maths", "code", "maths"]))
    >>> trace.domains, trace.domain.tolist()
    (('code', 'maths'), [1, 0, 1])
    """
    category = np.full(len(replay.mask), ONE_DOMAIN) if category is None else category
    names, domain = np.unique(category, return_inverse=True)
    domains = tuple(map(str, names))
    about = (replay, num_experts, name, note, domain.astype(np.int32), domains, synthetic)
    return Trace(*about, token_ids, recording)


def some_layers(trace: Trace, count: int) -> Trace:
    """Keep some layers of a trace, evenly spaced from the first to the last.

    Args:
        trace: the trace.
        count: the number of layers to keep, at least 1. A trace with no more layers is returned unchanged.
    """
    layers = trace.replay.expert_ids.shape[2]
    if layers <= count:
        return trace
    kept = [layer * (layers - 1) // max(count - 1, 1) for layer in range(count)]
    replay = trace.replay._replace(expert_ids=trace.replay.expert_ids[:, :, kept])
    return trace._replace(replay=replay, note=f"{trace.note}; {count} of {layers} layers".removeprefix("; "))
