"""The price for which a run plans, from the policy's sizes, the kind of its devices and the settings of the run."""

from typing import Literal

from jax.sharding import Mesh

from experiments.rl.configs import Train
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.models import Model
from relibra_jax.models import ModelConfig
from relibra_jax.nnx.derived_cost import cluster_of


def price_of(config: Train, mesh: Mesh) -> CostModel | Literal["balance"]:
    """Return the price for which the balancer of a run plans.

    It is of one pass over the batch: more epochs repeat all of it except the moves of experts, which then weigh too
    much and so are made too rarely.

    Args:
        config: the settings of the run.
        mesh: the device mesh of the model, whose devices determine the cluster.
    """
    if config.price == "balance":
        return "balance"
    # With routing=recompute the recompute routes live, so no plan changes its time.
    recompute = config.routing == "rollout"
    cluster = cluster_of(mesh.devices.flat[0])
    return CostModel(cluster=cluster, model=sizes_of(config.model_config), recompute=recompute)


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
