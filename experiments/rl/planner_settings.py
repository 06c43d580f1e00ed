"""How a run plans: how ReLibra's planners place and replicate experts, how samples are assigned, and the price."""

import dataclasses
import functools
from typing import Final, Literal

import jax.numpy as jnp

from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.models import ModelConfig
from relibra_jax.planning.assignment import Assign, assign_samples
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.replicate_for_time import replicate_for_time

TUNABLE: Final = ("relibra",)
"""The planners that take `Reorder` and `Replicate`. The variants of all others are planners with names of their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reorder:
    """How ReLibra's planners place experts between batches (`relibra_jax.planning.placement.place_experts`)."""

    steps: int = 500
    """The number of search steps in each round. More experts and layers need more steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicate:
    """How ReLibra's planners replicate experts in a batch (`relibra_jax.planning.replicate_for_time`)."""

    min_tokens: int = 1
    """The minimum number of token copies that a replica computes."""
    tile: int = 1
    """The number of token copies in a tile. Replicas compute whole tiles."""
    exact: bool = False
    """Whether to bring all ranks of a domain within one tile of each other, instead of only relieving the fullest."""


@functools.cache
def tuned_planner(name: str, reorder: Reorder, replicate: Replicate) -> PlannerEntry:
    """Return a planner of `TUNABLE` with its settings. Equal settings give the same object, so jit compiles once."""
    entry = PLANNERS[name]
    place = functools.partial(place_experts, **dataclasses.asdict(reorder))
    add_replicas = functools.partial(replicate_for_time, **dataclasses.asdict(replicate))
    planner = relibra(place=place, replicate=add_replicas)
    return dataclasses.replace(entry, planner=planner)


@functools.cache
def annealed(steps: int) -> Assign:
    """Return the assignment of samples with a number of annealing steps. Equal numbers give the same object."""
    return functools.partial(assign_samples, steps=steps)


def price_of(
    price: str, model: ModelConfig, cluster: Cluster, *, recompute: bool
) -> CostModel | Literal["balance"]:
    """Return the price for which the balancer of a run plans.

    It is of one pass over the batch: more epochs repeat all of it except the moves of experts, which then weigh too
    much and so are made too rarely.

    Args:
        price: the name of the price, ``time`` or ``balance``.
        model: the architecture and sizes of the model.
        cluster: the hardware.
        recompute: whether the recompute follows a plan. If it routes live, no plan changes its time.
    """
    if price == "balance":
        return "balance"
    width = jnp.dtype(model.dtype).itemsize
    return CostModel(cluster=cluster, model=sizes_of(model), recompute=recompute, compute_bytes=width)


def sizes_of(config: ModelConfig) -> Model:
    """Return the sizes of a model that determine its time.

    >>> from experiments.rl.policy import POLICIES
    >>> sizes = sizes_of(POLICIES["tiny"])
    >>> sizes.moe_layers, sizes.width, sizes.attention_params
    (4, 64, 12288)
    """
    return Model(
        moe_layers=config.moe_layers,
        num_experts=config.num_experts,
        top_k=config.top_k,
        width=config.width,
        expert_width=config.expert_width,
        shared_width=config.shared_width,
        attention_params=2 * config.width * config.head_width * (config.heads + config.kv_heads),
        attention_width=2 * config.heads * config.head_width,
        cache_width=2 * config.kv_heads * config.head_width,
        cache_heads=config.kv_heads,
        heads=config.heads,
        vocabulary=config.vocabulary,
    )
