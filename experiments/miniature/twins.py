"""Scaled twins: the widths, links and tokens with which a miniature has the ratios of a real model on a real cluster.

A plan's gain depends on ratios of times and not on the times. `relibra_jax.cost.cost_model.CostModel` prices the real
model and its twin, so the ratios are of the same formulas. The widths keep the ratio of F to D. The rates of the links
follow from the measured rate of a core.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final, NamedTuple

from experiments.miniature.policy import FLOAT, Sizes
from relibra_jax.contract.types import Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS

CONTEXT: Final = 4096.0
"""The mean length of a real sample in tokens."""
TOKENS: Final = 16384.0
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

    @property
    def num_experts(self) -> int:
        """The number of experts of a layer."""
        return MODELS[self.model].num_experts

    def sizes(self, layers: int) -> Sizes:
        """Return the sizes of the twin's model."""
        return Sizes(
            layers=layers,
            width=self.width,
            expert_width=self.expert_width,
            head_width=32,
            top_k=MODELS[self.model].top_k,
        )

    def real_ratios(self) -> "Ratios":
        """Return the ratios of the real model on the real cluster."""
        cost = CostModel(cluster=CLUSTERS[self.cluster], model=MODELS[self.model])
        return ratios(cost, tokens=TOKENS, context=CONTEXT)

    def links(self, flops: float) -> tuple[float, float]:
        """Return the bytes/s between and inside nodes with which the twin has the real ratios.

        Args:
            flops: FLOP/s of the experts on a rank.
        """
        real = self.real_ratios()
        copy = 2 * 3 * self.width * self.expert_width * 3 / flops
        slow = 4 * FLOAT * self.width / (real.crossing * copy)
        return slow, slow * real.links


TWINS: Final[Mapping[str, Twin]] = {
    "gpt-oss-20b": Twin(model="gpt-oss-20b", expert_width=128),
    "qwen3-30b": Twin(model="qwen3-30b-a3b", expert_width=48),
    "glm-4.5-air": Twin(model="glm-4.5-106b-a12b", expert_width=44),
    "qwen3-235b": Twin(model="qwen3-235b-a22b", expert_width=48),
    "gpt-oss-20b-ethernet": Twin(model="gpt-oss-20b", cluster="h100-ethernet-200", expert_width=128),
    "qwen3-30b-ethernet": Twin(model="qwen3-30b-a3b", cluster="h100-ethernet-200", expert_width=48),
}
"""The named twins."""


class Ratios(NamedTuple):
    """The ratios of times on which the gain of a plan depends."""

    crossing: float
    """The time of a row between nodes, over that of a token copy in an expert."""
    links: float
    """The time of a row between nodes, over that of a row inside a node."""
    push: float
    """The time to push a resident and return its gradient, over that of an expert's copies in a micro-batch."""
    attention: float
    """The time of a token outside the experts, over that of its copies."""
    copies: float
    """The token copies of an expert in a micro-batch, in multiples of F."""


def ratios(cost: CostModel, *, tokens: float, context: float) -> Ratios:
    """Return the ratios of a cost model, for eight ranks of two nodes.

    Args:
        cost: the cost model.
        tokens: the mean number of tokens of a rank in a micro-batch.
        context: the mean length of a sample in tokens.
    """
    model, ranks = cost.model, 8
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=model.num_experts, replica_slots=0)
    price, copies = cost.price(topology), tokens * ranks * model.top_k / model.num_experts
    copy = float(price.copy)
    return Ratios(
        crossing=float(price.crossing) / copy,
        links=float(price.crossing) / float(price.spread),
        push=float(price.push) / (copy * copies),
        attention=(float(price.token) + float(price.pair) * context) / (model.top_k * copy),
        copies=copies / model.expert_width,
    )
