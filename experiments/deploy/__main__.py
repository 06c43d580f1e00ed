"""``python -m experiments.deploy [TRACE]``: the deployment search of MegaScale-Infer, with loads of recorded routing.

Source of the search: MegaScale-Infer (arXiv 2504.02263), which assumes equally busy experts. All times are modelled.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
import tyro
from rich.console import Console

from experiments.deploy.best_deployments import find_best_deployments, over_micro_batches
from experiments.deploy.figure import draw_deployment
from experiments.deploy.report import deployment_numbers, deployment_table, explain
from experiments.deploy.serving import MEMORY_SHARE, Grid, Serving
from experiments.program import TraceName, run_program
from relibra_jax.cli.terminal import progress_bar
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.limits import check_integer, check_seed
from relibra_jax.support.output_paths import check_folder
from relibra_jax.support.suggestions import look_up
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import Trace

_ORDERS: Final = {"given": "", "shuffled": " in shuffled order"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deploy:
    """Size a rollout that serves attention and experts on separate devices, from recorded routing."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file.
    Its first half determines the placement of the experts; the simulated step is drawn from its second half."""
    order: Literal["given", "shuffled"] = "given"
    """The order of the samples: as the trace has them, or shuffled with --seed.
    Shuffle a trace that is sorted by data set, since its halves are different domains otherwise."""
    model: str = "gpt-oss-20b"
    """The model whose sizes are modelled, with the trace's number of experts and top-k."""
    attention_cluster: str = "h100"
    """The cluster whose devices serve attention."""
    expert_cluster: str = "h100"
    """The cluster whose devices serve the experts."""
    attention_price: float = 1.0
    """The price of an attention device, in any unit."""
    expert_price: float = 1.0
    """The price of an expert device, in the same unit."""
    context: float = 4096.0
    """The mean number of tokens of a sequence in the key-value cache."""
    slo: float = 0.1
    """The most seconds between two tokens of a sequence."""
    memory_share: float = MEMORY_SHARE
    """The share of a device's memory that weights and caches may take. A serving engine needs the rest."""
    expert_groups: Annotated[
        tuple[int, ...], tyro.conf.arg(help_behavior_hint="(default: all divisors of the number of experts)")
    ] = ()
    """Numbers to try: groups of expert devices."""
    replica_slots: tuple[int, ...] = (0, 1)
    """Numbers to try: replica slots in each group of expert devices."""
    grid: Annotated[Grid, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Grid)
    seed: int = 0
    """The seed of the shuffled order, of the placement search, and of the simulated step."""
    out: Path = Path("out/deploy")
    """The folder that the figure and the numbers are written to."""

    def serving(self) -> Serving:
        """Return what is served, on which hardware and within which limits, after a check of the options."""
        check_seed("seed", self.seed)
        for groups in self.expert_groups:
            check_integer("expert_groups", groups, least=1)
        if not self.replica_slots:
            raise ValueError("replica_slots must name at least one number of slots")
        serving = Serving(
            model=look_up("model=", self.model, MODELS),
            attention=look_up("attention_cluster=", self.attention_cluster, CLUSTERS),
            experts=look_up("expert_cluster=", self.expert_cluster, CLUSTERS),
            attention_price=self.attention_price,
            expert_price=self.expert_price,
            context=self.context,
            slo=self.slo,
            memory_share=self.memory_share,
        )
        self.grid.check(serving)
        return serving


def main(options: Deploy) -> None:
    """Search for the best deployments, print them, and write the figure and the numbers.

    It also prints how much throughput changes with the number of micro-batches in flight.

    Args:
        options: the trace, the model, the hardware, the limits, and the folder to write to.

    Raises:
        ValueError: if the trace and the settings do not fit each other, no deployment is feasible, or the
            folder is a file. Nothing is written then.
    """
    check_folder(options.out, option="out")
    serving, trace = options.serving(), read_trace(options.trace)
    console = Console(markup=False, emoji=False)
    sizes = {"num_experts": trace.num_experts, "top_k": trace.replay.expert_ids.shape[-1]}
    serving = dataclasses.replace(serving, model=dataclasses.replace(serving.model, **sizes))
    groups = options.expert_groups or _divisors(trace.num_experts)
    before, after = _halves(trace, options, serving.model.moe_layers)
    with progress_bar(console, width=12) as bar:
        task = bar.add_task("placements", total=len(groups) * len(options.replica_slots))
        found = find_best_deployments(
            serving,
            options.grid,
            before,
            after,
            groups=groups,
            replica_slots=options.replica_slots,
            seed=options.seed,
            progress=lambda: bar.update(task, advance=1),
        )
    planned = found[-1]
    title = (
        f"{options.model} with {trace.num_experts} experts, routing of {trace.name}{_ORDERS[options.order]}: attention"
        f" on {options.attention_cluster}, experts on {options.expert_cluster}, {options.slo * 1e3:g} ms per token"
    )
    console.print(deployment_table(found, title), crop=False, soft_wrap=True)
    in_flight = over_micro_batches(planned.search)
    for line in explain(planned, in_flight):
        console.print(line, highlight=False, soft_wrap=True)
    options.out.mkdir(parents=True, exist_ok=True)
    figure, numbers = options.out / "deploy.png", options.out / "deploy.json"
    draw_deployment(figure, in_flight, planned, title)
    report = {
        "setting": title,
        "rows": {deployment.experts: deployment_numbers(deployment) for deployment in found},
        "micro_batches": [point._asdict() for point in in_flight],
    }
    write_json(numbers, report)
    console.print(f"figure: {figure}\nnumbers: {numbers}", highlight=False, soft_wrap=True)


def _divisors(num_experts: int) -> tuple[int, ...]:
    return tuple(number for number in range(1, num_experts + 1) if num_experts % number == 0)


def _halves(trace: Trace, options: Deploy, layers: int) -> tuple[RoutingReplay, RoutingReplay]:
    """Both halves of a trace, the first to place experts by and the second to simulate; at most the model's layers."""
    ids, mask = (np.asarray(array) for array in trace.replay)
    ids = ids[:, :, :layers]
    if options.order == "shuffled":
        order = np.random.default_rng(options.seed).permutation(len(mask))
        ids, mask = ids[order], mask[order]
    half = len(mask) // 2
    if not mask[:half].any() or not mask[half:].any():
        raise ValueError(
            f"{trace.name} has no tokens in one half of its {len(mask)} samples; both halves need tokens, since experts"
            " are placed by the first half and the simulated step is drawn from the second"
        )
    return RoutingReplay(ids[:half], mask[:half]), RoutingReplay(ids[half:], mask[half:])


if __name__ == "__main__":
    sys.exit(run_program(main, Deploy))
