"""The price for which a balancer plans: sizes of the model's layers, speeds of the device, and what layers run.

A caller either gives a `CostModel` or gets one that is derived here. In both, what depends on how layers run is filled
in from the balancer's own settings, so that the price is of what runs.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from relibra_jax.contract.types import BALANCE, Price
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS, Cluster, find_cluster
from relibra_jax.cost.models import Model
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.nnx.layer import MoELayer
from relibra_jax.routing.exchange_rules import AUTO, IN_LANES

DEFAULT_CLUSTER: Final = "h100"
"""The cluster whose speeds are taken for devices that `relibra_jax.cost.hardware` does not name."""


class LayerSizes(NamedTuple):
    """The sizes of a model's MoE layers."""

    num_experts: int
    top_k: int
    width: int
    expert_width: int
    shared_width: int


def layer_sizes(model: nnx.Module) -> LayerSizes:
    """Read the sizes of a model's MoE layers.

    Args:
        model: a module with at least one `MoELayer`.

    Raises:
        ValueError: if there is no layer, or the layers differ in a size, so that there is no one price for them.
    """
    layers = [module for _, module in nnx.iter_modules(model) if isinstance(module, MoELayer)]
    if not layers:
        raise ValueError(f"the model, a {type(model).__name__}, contains no MoELayer")
    sizes = {
        LayerSizes(
            num_experts=layer.router.shape[-1],
            top_k=layer.gating.top_k,
            width=layer.width,
            expert_width=layer.expert_width,
            shared_width=0 if layer.shared is None else layer.shared.shape[-1],
        )
        for layer in layers
    }
    if len(sizes) > 1:
        first, second, *_ = sorted(sizes)
        raise ValueError(
            f"cost: one price needs layers of equal sizes, but the model has {first} and {second}:"
            " pass Balancer(cost='balance') to plan for balance"
        )
    return sizes.pop()


def derive_cost(model: nnx.Module, *, num_layers: int, mesh: Mesh) -> CostModel:
    """Derive a cost model from a model and the devices of a mesh.

    The model's own layers outside `MoELayer` are unknown. They are taken to be attention of the usual size: four square
    matrices, and heads that are as wide as the model together. The output head is left out.

    Args:
        model: a module with MoE layers of equal sizes.
        num_layers: L, the number of MoE layers.
        mesh: the device mesh, whose devices determine the cluster (`cluster_of`).

    Raises:
        ValueError: under the conditions of `layer_sizes`.
    """
    sizes = layer_sizes(model)
    width = sizes.width
    attention = {"attention_params": 4 * width**2, "attention_width": 2 * width}
    cache = {"cache_width": 2 * width, "cache_heads": 1}
    sizes_of_model = Model(moe_layers=num_layers, **sizes._asdict(), **attention, **cache)
    return CostModel(cluster=cluster_of(mesh.devices.flat[0]), model=sizes_of_model)


def cluster_of(device: Any) -> Cluster:
    """Return the named cluster for a device, by its `jax.Device.device_kind`.

    For devices without one it is `DEFAULT_CLUSTER`, which process 0 says in one line, once for each kind of device.
    """
    kind = device.device_kind
    name = find_cluster(kind)
    if name is None and not jax.process_index():
        _print_default(kind)
    return CLUSTERS[name or DEFAULT_CLUSTER]


@functools.cache
def _print_default(kind: str) -> None:
    print(
        f"relibra_jax: no speeds are known for {kind!r} devices, so plans are priced for {DEFAULT_CLUSTER!r}:"
        " pass Balancer(cost=CostModel(...)) for others",
        file=sys.stderr,
    )


def with_choices_of(cost: CostModel, parallel: ExpertParallel) -> ExpertParallel:
    """Return settings that make no choice which a cost model has made.

    Args:
        cost: the cost model, such as `relibra_jax.nnx.Balancer.cost` of another balancer.
        parallel: the settings with which layers execute plans.
    """
    exchange = cost.exchange if cost.exchange in parallel.exchanges else parallel.exchange
    striped = cost.striped if parallel.striped is None else parallel.striped
    across = cost.across_nodes if parallel.across_nodes is None else parallel.across_nodes
    return dataclasses.replace(parallel, exchange=exchange, striped=striped, across_nodes=across)


def resolve_cost(cost: CostModel, parallel: ExpertParallel, *, sequences: str) -> CostModel:
    """Fill in what layers run where a cost model says ``auto``.

    Args:
        cost: the cost model.
        parallel: the settings with which layers execute plans.
        sequences: ``padded``, ``packed`` or ``split``.

    Returns:
        The cost model of what runs.

    Raises:
        ValueError: if a field is fixed to something else than what runs.
    """
    top_k = cost.model.top_k
    kinds = parallel.with_striping(top_k).kinds(top_k)
    runs: dict[str, Any] = {
        "path": kinds.path,
        "exchange": priced_kind(kinds.exchange),
        "fetch": "padded" if kinds.fetch == "padded" else "ragged",
        "striped": kinds.striped,
        "across_nodes": parallel.across_nodes,
        "pieces": parallel.pieces,
        "late_replicas": parallel.late_replicas,
        "host_slots": 0,  # no layer of a Balancer fetches from the host
        "sequences": sequences,
        "data_parallel": parallel.num_groups,
        "spare_room": True,
    }
    # A single group and piece are the defaults, which a caller may not have chosen.
    anything = {
        "data_parallel": 1,
        "pieces": 1,
        "late_replicas": False,
        "striped": None,
        "across_nodes": None,
    }
    for name, value in runs.items():
        fixed = getattr(cost, name)
        if name == "striped" and parallel.topology.ranks_per_node == 1:
            continue  # a rank alone on its node deals no tokens
        if fixed not in (anything.get(name, AUTO), value):
            raise ValueError(f"cost: {name}={fixed!r}, but the layers of this Balancer run {name}={value!r}")
    return dataclasses.replace(cost, **runs)


def priced_kind(kind: str) -> str:
    """Return the kind of token exchange whose price applies to ``kind``, which may have no price of its own."""
    return kind if kind in (*IN_LANES, "ragged") else "needed"


def with_dtype_of(cost: CostModel, model: nnx.Module) -> CostModel:
    """Return the cost model for the dtype in which a model's MoE layers compute, unless it has a number of bytes.

    Args:
        cost: the cost model.
        model: a module with MoE layers. A layer without a ``dtype`` is taken to compute in the dtype of its weights.
    """
    if cost.compute_bytes is not None:
        return cost
    layers = (module for _, module in nnx.iter_modules(model) if isinstance(module, MoELayer))
    dtypes = (layer.experts[...].dtype if layer.dtype is None else layer.dtype for layer in layers)
    return dataclasses.replace(cost, compute_bytes=max(jnp.dtype(dtype).itemsize for dtype in dtypes))


def check_cost(cost: CostModel, model: nnx.Module, *, num_layers: int) -> None:
    """Raise ValueError unless a cost model has the sizes of a model's MoE layers.

    Args:
        cost: the cost model.
        model: a module with MoE layers of equal sizes.
        num_layers: L, the number of MoE layers.
    """
    sizes = {"moe_layers": num_layers, **layer_sizes(model)._asdict()}
    for name, size in sizes.items():
        priced = getattr(cost.model, name)
        if priced != size:
            raise ValueError(
                f"cost: its model has {name}={priced}, but the MoE layers of the model have {size}"
            )


def stage_prices(
    cost: CostModel | None,
    parallel: ExpertParallel,
    num_stages: int,
    *,
    updates: Sequence[int] | None,
    sequences: str,
) -> tuple[Price, ...]:
    """Return the price of each stage of a batch.

    Args:
        cost: the cost model. If it has a recompute and no stage is one, every stage recomputes too. None pays for
            balance alone.
        parallel: the settings with which layers execute plans.
        num_stages: the number of stages.
        updates: the number of optimizer updates in each stage, 0 for a stage that only recomputes. None takes 1 for
            each of several stages, and those of the cost model for a single stage.
        sequences: ``padded``, ``packed`` or ``split``.

    Raises:
        ValueError: if ``updates`` does not have an entry for each stage.
    """
    if updates is not None and len(updates) != num_stages:
        raise ValueError(f"updates has {len(updates)} entries, but there are {num_stages} stages")
    if cost is None:
        balance = dataclasses.replace(BALANCE, sequences=sequences, data_parallel=parallel.num_groups)
        return (balance,) * num_stages
    if updates is None:
        updates = (cost.updates,) if num_stages == 1 else (1,) * num_stages
    shared = cost.recompute and 0 not in updates
    return tuple(
        cost.price(parallel.topology, updates=number, recompute=shared or not number) for number in updates
    )
