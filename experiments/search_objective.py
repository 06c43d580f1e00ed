"""``python -m experiments.search_objective``: check whether the objective of the searches agrees with modelled time.

The program asks two questions about the second batch of `experiments.front_door`. The first is how well the modelled
time, with node visits counted exactly, follows the objective of the search over nodes
(`relibra_jax.planning.node_search`). Planned homes are disturbed by random swaps of experts between nodes, replicas are
planned anew, and the rank correlation of objective and time over these homes is taken in each layer. The second is
whether more effort gives a shorter batch: longer searches, which anneal differently, or more rounds, of which the first
ones stay as they are.
"""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from experiments.front_door import FrontDoor, make_case
from experiments.program import TraceName, run_program
from relibra_jax.contract.planner import Placement, PlanRequest
from relibra_jax.contract.types import BatchPlan
from relibra_jax.cost.step_time import attention_time, layer_time, rank_time
from relibra_jax.evaluation.comparison import run_planner
from relibra_jax.evaluation.outcome import Outcome
from relibra_jax.evaluation.planned import PlannedBatch
from relibra_jax.evaluation.prices import count_visits, time_of_balanced, time_of_batch
from relibra_jax.evaluation.setting import Setting
from relibra_jax.planning.assignment import assign_samples
from relibra_jax.planning.batch import count_batch
from relibra_jax.planning.node_placement import relative_prices
from relibra_jax.planning.node_search import NodeProblem, node_objective
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.plan_batch import plan_batch
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.replicate_for_time import replicate_for_time
from relibra_jax.planning.routes import place_routes
from relibra_jax.planning.token_bits import token_bits
from relibra_jax.routing.visits import node_visits
from relibra_jax.support.atomic_write import write_json
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import some_layers

RANKS: Final = ("2x4", "4x4")
SWAPS: Final = (0, 1, 2, 4, 8)
"""Numbers of random swaps between nodes."""
DRAWS: Final = 4
"""The number of disturbed homes for each number of swaps."""
STEPS: Final = (500, 2_000, 8_000, 32_000)
"""Numbers of annealing steps of each search for homes and for samples, in each round."""
ROUNDS: Final = (1, 2, 4, 8, 16)
"""Numbers of rounds of assignment and placement."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchObjective:
    """Compare the objective of the search over nodes with modelled time, and searches of several lengths."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
    record: Path | None = None
    """The JSON file for the numbers. None writes no file."""


def plan_case(case: Setting, steps: int) -> Outcome:
    """Plan both batches of a case with searches of a given length; return the outcome of the second."""
    planner = relibra(place=functools.partial(place_experts, steps=steps))
    assign = functools.partial(assign_samples, steps=steps)
    entry = PlannerEntry(planner=planner, summary=f"{steps} steps", assign=assign)
    return run_planner(f"{steps} steps", entry, case, timed_runs=0)


def shares_after_rounds(case: Setting) -> list[float]:
    """Return the second batch's share of the balanced run's speed after each of `ROUNDS`."""
    topology, planner = case.topology, PLANNERS["relibra"].planner
    price = case.cost_model.price(topology)
    planner_key, *keys = jax.random.split(jax.random.key(case.seed), 3)
    first, second = case.batches.replays
    state = planner.init(topology, second.expert_ids.shape[2], key=planner_key)
    options: dict[str, Any] = {
        "stages": case.batches.num_micro_batches,
        "cost": price,
        "assign": assign_samples,
    }
    _, state = plan_batch(first, planner, state, topology, key=keys[0], **options)
    shares = []
    for rounds in ROUNDS:
        batch_plan, _ = plan_batch(second, planner, state, topology, key=keys[1], rounds=rounds, **options)
        planned = PlannedBatch(
            second, batch_plan, state.home, np.zeros(batch_plan.load.shape[:2], np.float32)
        )
        time = time_of_batch(planned, topology, price, visits=count_visits(planned, topology, price))
        shares.append(float(time_of_balanced(planned, topology, price).total / time.total))
        jax.clear_caches()  # a process may hold only so many programs
    return shares


def swap_between_nodes(home: Int[np.ndarray, "L E"], nodes: int, swaps: int, rng: Any) -> np.ndarray:
    """Swap the homes of random pairs of experts on different nodes, in every layer."""
    home = home.copy()
    size = home.shape[1] // nodes
    for row in home:
        for _ in range(swaps):
            first = rng.integers(len(row))
            second = rng.choice(np.flatnonzero(row // size != row[first] // size))
            row[[first, second]] = row[[second, first]]
    return home


def correlations(outcome: Outcome) -> Float[np.ndarray, " L"]:
    """Return the rank correlation of objective and time over disturbed homes, for each layer of the second batch."""
    (batch,), topology = outcome.batches, outcome.setting.topology
    price, plan = outcome.cost_model.price(topology), batch.batch_plan
    counts = count_batch(batch.replay, topology)
    assert counts.routes is not None
    routes, load = place_routes(counts.routes, plan.assignment), jnp.asarray(plan.load)
    micro_batches, layers = load.shape[:2]
    nodes, top_k = topology.num_nodes, counts.routes.expert_ids.shape[-1]
    by_node = load.astype(jnp.float32).sum(3).transpose(2, 3, 0, 1)  # [N E M L]
    share = by_node.sum(0) * (nodes / by_node.sum((0, 1, 2)))
    prices = relative_prices(price, load.sum() / layers, topology, num_layers=layers, top_k=top_k)
    problem = NodeProblem(
        share,
        jnp.zeros((nodes, micro_batches, layers)),
        token_bits(routes, topology, num_micro_batches=micro_batches, scale=1),
        jnp.float32(prices.crossing),
        jnp.zeros((topology.num_experts, nodes, layers)),
    )
    objective = jax.jit(functools.partial(node_objective, problem, top_k=top_k))
    attention, _ = attention_time(plan.assignment, batch.lengths, price)
    request = PlanRequest(load, price=price, tokens=np.asarray(batch.rank_tokens, np.float32))

    @jax.jit
    def clock(disturbed: BatchPlan, visits: jax.Array) -> jax.Array:
        ranks = rank_time(disturbed.layer_plans(), attention, topology, price, visits=visits)
        return jnp.asarray(layer_time(ranks, price).total).sum(0)

    rng, scores, seconds = np.random.default_rng(0), [], []
    for swaps in np.repeat(SWAPS, DRAWS):
        home = swap_between_nodes(np.asarray(plan.plan.home), nodes, swaps, rng)
        placement = Placement.without_residents(jnp.asarray(home), topology)
        disturbed = plan._replace(plan=replicate_for_time(request, placement, topology))
        visits = node_visits(batch.replay, disturbed, topology, striped=price.striped)
        scores.append(objective(jnp.asarray(home // (topology.num_experts // nodes)).T))
        seconds.append(clock(disturbed, visits))
    pairs = zip(np.transpose(scores), np.transpose(seconds), strict=True)
    return np.array([spearmanr(*pair).statistic for pair in pairs])


def main(config: SearchObjective) -> int:
    """Print the correlations and the shares of balanced, and write them."""
    trace, console = some_layers(read_trace(config.trace), FrontDoor.layers), Console(width=120)
    shares = Table("ranks", *(f"{steps:,} steps" for steps in STEPS), "correlation, median", "least")
    by_rounds = Table("ranks", *(f"rounds: {number}" for number in ROUNDS))
    rows = []
    for ranks in RANKS:
        case = make_case(trace, FrontDoor(), ranks, 0)
        outcomes = []
        for steps in STEPS:
            outcomes.append(plan_case(case, steps))
            jax.clear_caches()  # a process may hold only so many programs
        row = {
            "ranks": ranks,
            "share_of_balanced": [each.share_of_balanced for each in outcomes],
            "share_after_rounds": shares_after_rounds(case),
        }
        found = correlations(outcomes[1])
        rows.append(row | {"correlation": found.tolist()})
        cells = [f"{share:.1%}" for share in row["share_of_balanced"]]
        shares.add_row(ranks, *cells, f"{np.median(found):.3f}", f"{found.min():.3f}")
        by_rounds.add_row(ranks, *(f"{share:.1%}" for share in row["share_after_rounds"]))
    console.print(shares, by_rounds)
    if config.record is not None:
        numbers = {"steps": STEPS, "rounds": ROUNDS, "swaps": SWAPS}
        write_json(config.record, {"trace": trace.name, **numbers, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, SearchObjective))
