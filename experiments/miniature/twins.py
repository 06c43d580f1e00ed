"""Scaled twins: the widths, links and tokens with which a miniature has the ratios of a real model on a real cluster.

A plan's gain depends on ratios of times and not on the times. `relibra_jax.cost.cost_model.CostModel` prices both, so
the ratios are of the same formulas. The widths keep the ratio of F to D; the rates of the links follow from the measured
rate of a core; the tokens follow from the size of an expert.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final, NamedTuple

from experiments.miniature.cluster import Miniature
from experiments.miniature.policy import Sizes
from relibra_jax.contract.types import Price, Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS, Cluster
from relibra_jax.cost.models import MODELS, Model

CONTEXT: Final = 4096
"""The mean length of a real sample in tokens."""
TOKENS: Final = 16384
"""The tokens of a real rank in a micro-batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twin:
    """A real model on a real cluster, and the widths of its twin."""

    model: str
    """The name of the real model."""
    cluster: str = "h100"
    """The name of the real cluster."""
    width: int = 128
    """The twin's model width D."""
    expert_width: int
    """The twin's expert width F."""
    layers: int = 4
    """The twin's number of layers."""
    trace: str
    """The routing."""

    def sizes(self) -> Sizes:
        """Return the sizes of the twin's model."""
        real = MODELS[self.model]
        return Sizes(
            layers=self.layers,
            width=self.width,
            expert_width=self.expert_width,
            head_width=32,
            top_k=real.top_k,
        )


TWINS: Final[Mapping[str, Twin]] = {
    "gpt-oss-20b": Twin(model="gpt-oss-20b", width=64, expert_width=64, trace="gpt-oss"),
    "qwen3-30b": Twin(model="qwen3-30b-a3b", expert_width=48, trace="synthetic-128"),
    "glm-4.5-air": Twin(model="glm-4.5-106b-a12b", expert_width=44, trace="synthetic-128"),
    "qwen3-235b": Twin(model="qwen3-235b-a22b", expert_width=48, trace="synthetic-128"),
    "qwen3-30b-ethernet": Twin(
        model="qwen3-30b-a3b", cluster="h100-ethernet-200", expert_width=48, trace="synthetic-128"
    ),
}
"""The named twins."""


class Ratios(NamedTuple):
    """The ratios of times on which the gain of a plan depends."""

    crossing: float
    """The time of a row between nodes, over that of a token copy in an expert."""
    links: float
    """The time of a row between nodes, over that of a row inside a node."""
    push: float
    """The time to push a resident and return its gradient, over that of the expert's copies in a micro-batch."""
    attention: float
    """The time of a token outside the experts, over that of its copies."""
    copies: float
    """The token copies of an expert in a micro-batch, in multiples of F."""


def ratios(price: Price, model: Model, *, copies: float, context: float) -> Ratios:
    """Return the ratios of a price.

    Args:
        price: the price.
        model: the sizes of the model.
        copies: the mean number of token copies of an expert in a micro-batch.
        context: the mean length of a sample in tokens.
    """
    copy = float(price.copy)
    return Ratios(
        crossing=float(price.crossing) / copy,
        links=float(price.crossing) / float(price.spread),
        push=float(price.push) / (copy * copies),
        attention=(float(price.token) + float(price.pair) * context) / (model.top_k * copy),
        copies=copies / model.expert_width,
    )
