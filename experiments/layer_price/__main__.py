"""``python -m experiments.layer_price MODEL CLUSTER``: the operations of one MoE layer, and what each of them costs.

The times are modelled from bytes, products, launches and the rates of a cluster (`relibra_jax.cost.layer_operations`).
With ``--profile`` they are beside those that `experiments.gpu_day` measured on one GPU.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from experiments.layer_price.figure import draw_layer
from experiments.layer_price.measured import read_profile
from experiments.layer_price.report import layer_numbers, layer_table, savings_table, scope_table, summary
from experiments.layer_price.savings import price_savings
from experiments.program import run_program
from relibra_jax.contract.types import Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.layer_operations import layer_operations
from relibra_jax.cost.models import MODELS
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.limits import check_integer
from relibra_jax.support.suggestions import look_up


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPrice:
    """Price one MoE layer of a rank, operation by operation, for even load and uniform routing."""

    model: tyro.conf.Positional[str]
    """The model, for example qwen3-30b-a3b."""
    cluster: tyro.conf.Positional[str]
    """The cluster, for example h100, h200, a100 or b200."""
    nodes: int = 2
    """The number of nodes of the expert-parallel group."""
    ranks: int = 8
    """The number of ranks of a node."""
    tokens: int = 8192
    """The number of tokens of a rank in a micro-batch."""
    path: Literal["auto", "flat", "hierarchical"] = "auto"
    """The path of tokens. hierarchical: a token is sent to a node once, or on a single node to a rank once."""
    exchange: Literal["auto", "padded", "fitted", "ragged"] = "auto"
    """The exchange of tokens; auto is what a cost model takes for GPUs."""
    striped: bool | None = None
    """Whether the ranks of a node deal their tokens to each other before dispatch; None for the rule of a Balancer."""
    replica_slots: int = 0
    """The number of replica slots of a rank, all of them filled."""
    spare_room: bool = True
    """Whether buffers have spare room, as those of a Balancer; --no-spare-room for as much as a batch needs."""
    checkpointed: bool = False
    """Whether the backward pass dispatches tokens and fetches replicas again, as under jax.checkpoint."""
    sample_tokens: int | None = None
    """The number of tokens of a sample, to list attention with its projections too."""
    savings: bool = False
    """Whether to price operations that a layer could do without."""
    profile: Path | None = None
    """The record of experiments.gpu_day whose measured times to print beside the modelled ones."""
    out: Path | None = None
    """The folder that the figure and the numbers are written to; None for neither."""


def main(options: LayerPrice) -> None:
    """Print the operations of a layer as a table, and write the figure and the numbers.

    Args:
        options: the model, the cluster and the way in which the layer runs.

    Raises:
        ValueError: if a name is unknown, a number is out of range, or the profile is of another layer.
    """
    model = look_up("model=", options.model, MODELS)
    cluster = look_up("cluster=", options.cluster, CLUSTERS)
    for name in ("nodes", "ranks"):
        check_integer(name, getattr(options, name), least=1)
    if options.ranks > cluster.node_ranks:
        raise ValueError(
            f"ranks={options.ranks}: the fast network of {options.cluster} connects at most {cluster.node_ranks} ranks"
        )
    topology = Topology(
        num_nodes=options.nodes,
        ranks_per_node=options.ranks,
        num_experts=-(-model.num_experts // (options.nodes * options.ranks)) * options.nodes * options.ranks,
        replica_slots=options.replica_slots,
    )
    run = CostModel(
        cluster=cluster,
        model=model,
        path=options.path,
        exchange=options.exchange,
        striped=options.striped,
        spare_room=options.spare_room,
    )
    run = run.with_striping(topology).on(topology)
    operations = layer_operations(
        run,
        topology,
        options.tokens,
        sample_tokens=options.sample_tokens,
        checkpointed=options.checkpointed,
    )
    measured = None
    if options.profile is not None:
        measured = read_profile(options.profile, tokens=options.tokens, model=model)
    title = (
        f"{options.model} on {options.cluster}, {options.nodes} x {options.ranks} ranks, {options.tokens:,} tokens a"
        f" rank, {run.path}, {run.exchange}{', striped' if run.striped else ''}: modelled"
    )
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(layer_table(operations, cluster, title, measured))
    console.print(summary(operations, cluster), highlight=False, soft_wrap=True)
    if measured is not None:
        console.print(scope_table(operations, cluster, measured))
    savings = price_savings(run, topology, options.tokens) if options.savings else None
    if savings is not None:
        console.print(savings_table(savings, operations, cluster))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        figure, numbers = options.out / "layer_price.png", options.out / "layer_price.json"
        draw_layer(figure, operations, cluster, title)
        write_json(numbers, {"setting": title, **layer_numbers(operations, cluster), "savings": savings})
        console.print(f"figure: {figure}\nnumbers: {numbers}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(run_program(main, LayerPrice))
