"""Reference solvers, for benchmarks and tests: EPLB in NumPy and in Python loops, and exact replication.

`numpy_rebalance` processes all layers at once; `python_rebalance` has the loop structure of the published EPLB
(github.com/deepseek-ai/EPLB), layer by layer and item by item. Both return ``physical_to_logical[L P]``.
`solve_replication` solves replication as a mixed-integer program with SciPy's HiGHS.
"""

from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp


def numpy_rebalance(
    load: np.ndarray, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int
) -> np.ndarray:
    """Run EPLB, vectorised over layers and nodes with NumPy.

    Args:
        load: the token copies of each expert, ``[L E]``.
        num_slots: the number of physical slots P of all ranks together.
        num_groups: the number of groups of experts; the experts of a group stay on one node.
        num_nodes: the number of nodes.
        num_ranks: the number of ranks.

    Returns:
        The logical expert in each physical slot, ``[L P]``.
    """
    load = np.asarray(load, np.float32)
    layers, experts = load.shape
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    size = experts // num_groups
    node, position = _numpy_pack(load.reshape(layers, num_groups, size).sum(-1), num_nodes)
    start = (node * (num_groups // num_nodes) + position) * size
    by_node = np.argsort((start[..., None] + np.arange(size)).reshape(layers, -1), axis=-1, kind="stable")

    rows = layers * num_nodes
    local = np.take_along_axis(load, by_node, -1).reshape(rows, -1)
    count = np.ones(local.shape, np.int64)
    item = np.tile(np.arange(local.shape[1]), (rows, 1))
    for _ in range(num_slots // num_nodes - local.shape[1]):
        hottest = (local / count.astype(np.float32)).argmax(-1)
        count[np.arange(rows), hottest] += 1
        item = np.column_stack([item, hottest])
    share = np.take_along_axis(local / count.astype(np.float32), item, -1)
    rank, position = _numpy_pack(share, num_ranks // num_nodes)
    order = np.argsort(rank * (num_slots // num_ranks) + position, axis=-1)
    item = np.take_along_axis(item, order, -1)
    return np.take_along_axis(by_node.reshape(rows, -1), item, -1).reshape(layers, num_slots)


def _numpy_pack(load: np.ndarray, num_packs: int) -> tuple[np.ndarray, np.ndarray]:
    rows, items = load.shape
    room = items // num_packs
    if room == 1:
        return np.tile(np.arange(items), (rows, 1)), np.zeros((rows, items), np.int64)
    order = np.argsort(-load, axis=-1, kind="stable")
    total, count = np.zeros((rows, num_packs), np.float32), np.zeros((rows, num_packs), np.int64)
    pack, position = np.empty((rows, items), np.int64), np.empty((rows, items), np.int64)
    row = np.arange(rows)
    for item in order.T:
        chosen = np.where(count < room, total, np.inf).argmin(-1)
        pack[row, item], position[row, item] = chosen, count[row, chosen]
        total[row, chosen] += load[row, item]
        count[row, chosen] += 1
    return pack, position


def python_rebalance(
    load: np.ndarray, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int
) -> list[list[int]]:
    """Run EPLB with Python loops over layers and items.

    Args:
        load: the token copies of each expert, ``[L E]``.
        num_slots: the number of physical slots P of all ranks together.
        num_groups: the number of groups of experts; the experts of a group stay on one node.
        num_nodes: the number of nodes.
        num_ranks: the number of ranks.

    Returns:
        The logical expert in each physical slot, ``[L P]``.
    """
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    size = load.shape[1] // num_groups
    layers = np.asarray(load, np.float32)
    return [_python_layer(layer, size, num_slots, num_nodes, num_ranks) for layer in layers]


def _python_layer(layer: np.ndarray, size: int, num_slots: int, num_nodes: int, num_ranks: int) -> list[int]:
    # The scalars are float32, because EPLB compares and sums in single precision.
    groups, loads = list(layer.reshape(-1, size).sum(-1)), list(layer)
    slots = []
    for members in _python_pack(groups, num_nodes):
        experts = [group * size + i for group in members for i in range(size)]
        count = dict.fromkeys(experts, 1)
        copies = list(experts)
        while len(copies) < num_slots // num_nodes:
            hottest = max(experts, key=lambda expert: loads[expert] / np.float32(count[expert]))
            count[hottest] += 1
            copies.append(hottest)
        shares = [loads[expert] / np.float32(count[expert]) for expert in copies]
        slots += [copies[i] for pack in _python_pack(shares, num_ranks // num_nodes) for i in pack]
    return slots


def _python_pack(load: list[np.float32], num_packs: int) -> list[list[int]]:
    room = len(load) // num_packs
    if room == 1:
        return [[i] for i in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    total = [np.float32(0)] * num_packs
    for item in sorted(range(len(load)), key=lambda i: -load[i]):
        lightest = min((i for i in range(num_packs) if len(packs[i]) < room), key=total.__getitem__)
        packs[lightest].append(item)
        total[lightest] += load[item]
    return packs


def solve_replication(
    load: np.ndarray,
    slots: int,
    *,
    tile: int = 1,
    top: int | None = None,
    replica: np.ndarray | None = None,
) -> int:
    """Solve replication in one domain of ranks as a mixed-integer program, with SciPy's HiGHS.

    Args:
        load: the token copies of each expert by home slot, ``[P H]``.
        slots: the number of replica slots of a rank.
        tile: the number of token copies in a tile; replicas compute whole tiles.
        top: a bound on the largest rank load, under which the number of replicas is minimised. None minimises the
            largest rank load instead.
        replica: the experts of which each rank may have replicas, by flat home slot, ``[P R]``. None allows all.

    Returns:
        A lower bound on the largest rank load, or on the number of replicas if ``top`` is given. It is the optimum
        unless the solver reaches its time limit of 5 seconds.
    """
    ranks, homes = load.shape
    tokens, start = load.ravel(), load.sum(1)
    expert, rank = np.divmod(np.arange(load.size * ranks), ranks)
    usable = (rank != expert // homes) & (tokens[expert] >= tile)
    if replica is not None:
        usable &= (replica[rank] == expert[:, None]).any(1)
    expert, rank = expert[usable], rank[usable]
    pairs = expert.size
    zero, copy = np.zeros, np.eye(pairs)
    # Variables: the tiles of each replica, whether it exists, and the largest rank load.
    change = tile * (
        (rank == np.arange(ranks)[:, None]) * 1.0 - (expert // homes == np.arange(ranks)[:, None])
    )
    rows: list[tuple[np.ndarray, Any]] = [
        (np.hstack([change, zero((ranks, pairs)), -np.ones((ranks, 1))]), -start),
        (np.hstack([zero((ranks, pairs)), rank == np.arange(ranks)[:, None], zero((ranks, 1))]), slots),
        (np.hstack([expert == np.arange(load.size)[:, None], zero((load.size, pairs + 1))]), tokens // tile),
        (np.hstack([copy, -copy * (tokens[expert] // tile), zero((pairs, 1))]), 0),
    ]
    matrix = np.vstack([row for row, _ in rows])
    upper = np.concatenate([np.broadcast_to(most, len(row)) for row, most in rows])
    largest = start.max() if top is None else top
    goal = zero(2 * pairs + 1)
    goal[pairs:-1], goal[-1] = (0, 1) if top is None else (1, 0)
    solution = milp(
        goal,
        constraints=LinearConstraint(matrix, -np.inf, upper),
        bounds=Bounds(
            np.append(zero(2 * pairs), -(-load.sum() // ranks)),
            np.concatenate([tokens[expert] // tile, np.ones(pairs), [largest]]),
        ),
        integrality=np.append(np.ones(2 * pairs), 0),
        options={"time_limit": 5, "mip_rel_gap": 1e-6},
    )
    # A solver that reaches its time limit returns only a lower bound; a plan then looks worse than it is, never better.
    return round(np.ceil(solution.mip_dual_bound - 1e-3))
