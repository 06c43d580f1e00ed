"""The table of planners, `PLANNERS`, which the tests, the command line and the figures read.

A planner is a pair of pure functions (see `relibra_jax.contract.planner.Planner`). To add one, write a function that
returns a planner and add an entry to the table.
"""

import dataclasses

from relibra_jax.contract.planner import Planner
from relibra_jax.planning.assignment import Assign
from relibra_jax.planning.baselines.eplb import eplb
from relibra_jax.planning.baselines.feplb import feplb
from relibra_jax.planning.baselines.foremoe import PUBLISHED, foremoe
from relibra_jax.planning.baselines.laer import laer
from relibra_jax.planning.baselines.llep import llep
from relibra_jax.planning.baselines.lplb import lplb
from relibra_jax.planning.baselines.moonep import moonep
from relibra_jax.planning.baselines.popfetcher import popfetcher
from relibra_jax.planning.baselines.static import static
from relibra_jax.planning.baselines.ultraep import ultraep
from relibra_jax.planning.relibra import relibra


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerEntry:
    """A planner with the settings that reports use, and the properties of its plans."""

    planner: Planner
    """The planner with these settings."""
    summary: str
    """One line that describes it in tables and help texts."""
    across_nodes: bool = False
    """Whether a replica may be on a different node than its expert's home, whatever the price says."""
    foresight: bool = True
    """Whether the planner sees the true loads, as routing replay allows."""
    forecast: str = "true"
    """How the planner forecasts loads: a name in `relibra_jax.planning.baselines.forecasts.FORECASTS`."""
    scope: str = "micro_batch"
    """How often the planner chooses replicas: for every ``micro_batch``, or once per ``batch``."""
    reconstruction: bool = False
    """Whether the system's code is not public, so that the planner follows the text of its paper alone."""
    late_replicas: bool = False
    """Whether the system computes home experts while replicas arrive (`relibra_jax.execution.late_replicas`)."""
    assign: Assign | None = None
    """The function that assigns samples to ranks and micro-batches. None keeps the assignment by lengths."""


PLANNERS: dict[str, PlannerEntry] = {
    "static": PlannerEntry(planner=static(), summary="Megatron-LM: contiguous placement, no replicas"),
    "eplb_history": PlannerEntry(
        planner=eplb(loads="history", scope="batch", keep_homes=True),
        summary="EPLB from the previous batch's loads",
        foresight=False,
        forecast="history",
        scope="batch",
    ),
    "eplb_mean": PlannerEntry(
        planner=eplb(loads="mean", keep_homes=True),
        summary="EPLB from the mean of all previous micro-batches",
        foresight=False,
        forecast="mean",
    ),
    "eplb_average": PlannerEntry(
        planner=eplb(loads="average", keep_homes=True),
        summary="EPLB from the exponential average of the previous micro-batches",
        foresight=False,
        forecast="average",
    ),
    "eplb_next_token": PlannerEntry(
        planner=eplb(loads="next_token", keep_homes=True),
        summary="EPLB from the experts of the token that precedes each token",
        foresight=False,
        forecast="next_token",
    ),
    "popfetcher": PlannerEntry(
        planner=popfetcher(packed=True),
        summary="PopFetcher: homes kept, ranks fetch experts predicted from the layer below",
        across_nodes=True,
        foresight=False,
        forecast="popularity",
        reconstruction=True,
    ),
    # The rule of `popfetcher` fetches little where links are fast. Copies that balance do better with its forecast.
    "popfetcher_even": PlannerEntry(
        planner=eplb(loads="across_layers", keep_homes=True),
        summary="EPLB's copies inside nodes, predicted from the layer below as in PopFetcher",
        foresight=False,
        forecast="across_layers",
        reconstruction=True,
    ),
    "eplb_batch": PlannerEntry(
        planner=eplb(scope="batch", keep_homes=True),
        summary="EPLB from the batch's true loads",
        scope="batch",
    ),
    "eplb": PlannerEntry(
        planner=eplb(keep_homes=True),
        summary="EPLB from each micro-batch's true loads (EPLB+), homes kept from the first batch",
    ),
    "eplb_repacked": PlannerEntry(planner=eplb(), summary="EPLB+, homes packed again in every batch"),
    "eplb_global": PlannerEntry(
        planner=eplb(across_nodes=True, keep_homes=True),
        summary="EPLB+, homes kept, nodes ignored",
        across_nodes=True,
    ),
    "lplb_history": PlannerEntry(
        planner=lplb(loads="history", scope="batch", keep_homes=True),
        summary="LPLB placed from the previous batch's loads, split from true loads",
        foresight=False,
        forecast="history",
        scope="batch",
    ),
    "lplb": PlannerEntry(
        planner=lplb(keep_homes=True),
        summary="LPLB from each micro-batch's true loads (LPLB+), homes kept from the first batch",
    ),
    "lplb_repacked": PlannerEntry(planner=lplb(), summary="LPLB+, homes packed again in every batch"),
    "ultraep": PlannerEntry(
        planner=ultraep(tolerance=0.0, min_tokens=None, packed=True),
        summary="UltraEP: homes kept, ranks spill load down to the smallest possible threshold",
    ),
    # A token of a recorded trace stands for many, so no product is too small; the fallback would only cost balance.
    "llep": PlannerEntry(
        planner=llep(min_tokens=1, fallback=1.0, packed=True),
        summary="LLEP: homes kept, excess load moved to the least loaded ranks",
    ),
    "moonep": PlannerEntry(
        planner=moonep(packed=True), summary="MoonEP: homes kept, ranks of a node brought to equal loads"
    ),
    "laer": PlannerEntry(
        planner=laer(),
        summary="LAER-MoE: the layout with the least modelled time in each micro-batch",
        across_nodes=True,
    ),
    "foremoe": PlannerEntry(
        planner=foremoe(),
        summary="ForeMoE: a base placement, whole experts moved in each micro-batch",
        across_nodes=True,
        reconstruction=True,
    ),
    "foremoe_published": PlannerEntry(
        planner=foremoe(settings=PUBLISHED),
        summary="ForeMoE by its text alone, without settings picked on a trace",
        across_nodes=True,
        reconstruction=True,
    ),
    "feplb": PlannerEntry(
        planner=feplb(),
        summary="FEPLB: the busiest experts moved whole inside their node",
        late_replicas=True,
        reconstruction=True,
    ),
    "relibra": PlannerEntry(
        planner=relibra(),
        summary="ReLibra: experts reordered between batches, replicated in each micro-batch",
    ),
}
"""The planners with the settings that reports use, by name."""
