"""A small cluster and a small model, with round numbers for calculations by hand, and what a batch costs on them."""

from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model

CLUSTER = Cluster(
    matmul_flops=1e6,
    matmul_efficiency=0.5,
    fast_bandwidth=1000.0,
    slow_bandwidth=100.0,
    memory=1e4,
    memory_bandwidth=2000.0,
    network_efficiency=0.5,
    memory_efficiency=0.5,
    tile=16,
)
MODEL = Model(
    moe_layers=1,
    num_experts=8,
    top_k=2,
    width=4,
    expert_width=5,
    shared_width=0,
    attention_params=50,
    attention_width=10,
    cache_width=6,
    cache_heads=2,
)
NEEDED = CostModel(cluster=CLUSTER, model=MODEL, exchange="needed", fetch="ragged")
"""The cost model of exchanges that send the rows that are needed, on the path that ``auto`` chooses."""
