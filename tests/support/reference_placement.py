"""The minimum time of a batch over homes, residents and quotas, as a mixed-integer program for SciPy's HiGHS.

It is an oracle for tiny instances with one rank per node, one layer and the flat path, on which every copy crosses
separately.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from relibra_jax.contract.types import Price


class PlacedBatch(NamedTuple):
    """The placement of experts and the quotas of nodes, in one layer of a batch."""

    home_node: np.ndarray
    """The node of each expert's home, ``[E]``."""
    resident: np.ndarray
    """Whether a node has the expert as a resident, ``[N E]``."""
    quota: np.ndarray
    """The token copies that each node computes, by the node that holds them, ``[M E from N]``."""


def batch_seconds(batch: PlacedBatch, old_node: np.ndarray, cost: Price) -> float:
    """Compute the time of a batch.

    It is the sum of the largest load and the busiest exchange of every micro-batch, the moves, spread over the nodes,
    and the largest number of pushes to a node.

    Args:
        batch: the placement and the quotas.
        old_node: the node of each expert before the batch, ``[E]``.
        cost: the price.

    Returns:
        The time in seconds.

    >>> quota = np.array([[[[8, 0], [0, 2]]]])  # one expert, 8 copies on its node and 2 at a resident
    >>> placed = PlacedBatch(np.array([0]), np.array([[False], [True]]), quota)
    >>> cost = Price(token=0.0, copy=2.0, crossing=5.0, spread=0.0, move=9.0, push=1.0)
    >>> batch_seconds(placed, np.array([1]), cost)
    21.5
    """
    nodes = len(batch.resident)
    across = batch.quota.sum(1) * (1 - np.eye(nodes, dtype=int))
    busiest = np.maximum(across.sum(1), across.sum(2)).max(1).sum()
    largest = batch.quota.sum((1, 2)).max(1).sum()
    moves = (batch.home_node != old_node).sum() / nodes
    pushes = batch.resident.sum(1).max()
    return float(cost.copy * largest + cost.crossing * busiest + cost.move * moves + cost.push * pushes)


def solve_batch(load: np.ndarray, old_node: np.ndarray, cost: Price, *, resident_slots: int) -> PlacedBatch:
    """Place experts and split their copies to minimise `batch_seconds`.

    Args:
        load: the token copies by the node that holds them, ``[M N E]``.
        old_node: the node of each expert before the batch, ``[E]``.
        cost: the price.
        resident_slots: the number of resident slots of a node.

    Returns:
        The best placement that the solver finds in a minute; its quotas may be fractions.
    """
    micro_batches, nodes, experts = load.shape
    supply = load.swapaxes(1, 2)  # [M E N]
    # Variables: homes and residents [N E], quotas [M E N N], largest load and busiest exchange [M], largest pushes.
    sizes = np.array([nodes * experts, nodes * experts, supply.size * nodes, micro_batches, micro_batches, 1])
    end = np.cumsum(sizes)
    numbers = [np.arange(stop - size, stop) for size, stop in zip(sizes, end, strict=True)]
    home, resident = numbers[0].reshape(nodes, experts), numbers[1].reshape(nodes, experts)
    quota, largest, busiest, pushes = numbers[2].reshape(*supply.shape, nodes), *numbers[3:]
    rows: list[np.ndarray] = []
    lower: list[float] = []
    upper: list[float] = []

    def bound(terms, least, most):
        row = np.zeros(end[-1])
        for variables, factor in terms:
            row[np.ravel(variables)] += factor
        rows.append(row)
        lower.append(least)
        upper.append(most)

    for expert in range(experts):
        bound([(home[:, expert], 1)], 1, 1)
        for node in range(nodes):
            bound([(home[node, expert], 1), (resident[node, expert], 1)], 0, 1)
    for node in range(nodes):
        bound([(home[node], 1)], experts / nodes, experts / nodes)
        bound([(resident[node], 1)], 0, resident_slots)
        bound([(resident[node], 1), (pushes, -1)], -np.inf, 0)
    for m, expert, source in np.ndindex(supply.shape):
        copies = supply[m, expert, source]
        bound([(quota[m, expert, source], 1)], copies, copies)
        for node in range(nodes):
            local_copies = [(home[node, expert], -copies), (resident[node, expert], -copies)]
            bound([(quota[m, expert, source, node], 1), *local_copies], -np.inf, 0)
    for m, node in np.ndindex(micro_batches, nodes):
        others = np.delete(np.arange(nodes), node)
        bound([(quota[m, :, :, node], 1), (largest[m], -1)], -np.inf, 0)
        bound([(quota[m][:, node][:, others], 1), (busiest[m], -1)], -np.inf, 0)
        bound([(quota[m][:, others, node], 1), (busiest[m], -1)], -np.inf, 0)

    goal = np.zeros(end[-1])
    moved = np.asarray(old_node) != np.arange(nodes)[:, None]
    goal[home] = np.where(moved, cost.move / nodes, 0)
    goal[largest], goal[busiest], goal[pushes] = cost.copy, cost.crossing, cost.push
    solution = milp(
        goal,
        constraints=LinearConstraint(np.stack(rows), np.array(lower), np.array(upper)),
        bounds=Bounds(0, np.where(np.arange(end[-1]) < end[1], 1, np.inf)),
        integrality=np.arange(end[-1]) < end[1],
        options={"time_limit": 60, "mip_rel_gap": 1e-6},
    )
    values = solution.x
    return PlacedBatch(values[home].argmax(0), values[resident] > 0.5, values[quota])
