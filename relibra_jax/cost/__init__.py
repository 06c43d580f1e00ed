"""Models of the time that a plan takes and of the memory that it needs; nothing here was measured on a cluster.

==================  ==================================================================================================
`cost_model`        what a batch is priced for, and the seconds of one unit of each kind of work: the only price
`batch_time`        the time of a batch under its plan, and of balanced runs
`step_time`         the time of its layers: attention, experts, exchange, and the part of replica transfers that
                    attention does not hide
`copies`            the time to transfer experts: replicas, residents, and experts that change home
`host_slots`        how many replicas come from the host's memory
`traffic`           the rows and experts that ranks send and receive
`least_time`        a lower bound of the time of a batch over all plans
`least_crossings`   a lower bound of the crossings between nodes, by `node_relaxation` and `token_weights`
`least_spread`      a lower bound of the token copies that are sent inside nodes
`row_prices`        what a row of an exchange costs at least
`layer_operations`  the operations of one layer of an evenly loaded rank, each with its bytes, launches and seconds
`hop_rows`          the rows that its hops move
`group_exchange`    the time in which data-parallel groups exchange weights and gradients
`memory`            the memory of a rank
`hardware`          named clusters
`models`            named models
==================  ==================================================================================================
"""

from relibra_jax.cost.batch_time import BatchTime, balanced_time, batch_time
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.group_exchange import group_exchange_time
from relibra_jax.cost.hardware import CLUSTERS, Cluster
from relibra_jax.cost.least_time import LeastTime, least_time
from relibra_jax.cost.memory import RankMemory, check_rank_memory, rank_memory
from relibra_jax.cost.models import MODELS, Model
from relibra_jax.cost.step_time import LayerTime, RankTime, attention_time, layer_time, rank_time

__all__ = [
    "CLUSTERS",
    "MODELS",
    "BatchTime",
    "Cluster",
    "CostModel",
    "LayerTime",
    "LeastTime",
    "Model",
    "RankMemory",
    "RankTime",
    "attention_time",
    "balanced_time",
    "batch_time",
    "check_rank_memory",
    "group_exchange_time",
    "layer_time",
    "least_time",
    "rank_memory",
    "rank_time",
]
