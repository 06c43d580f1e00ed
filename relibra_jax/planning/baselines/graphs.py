"""Fixed graphs between ranks, along which LPLB copies experts.

The names are those of github.com/deepseek-ai/LPLB. A graph is an array ``edges[P d]``: rank ``p`` copies its heaviest
experts to ``edges[p, 0]``, ``edges[p, 1]``, ... Every column is a permutation of the ranks, so each rank receives as
many copies as it sends, and column ``k`` fills replica slot ``k`` of every rank.
"""

import numpy as np
from jaxtyping import Int


def ring(num_ranks: int) -> np.ndarray:
    """Make a ring: the first edge leads to the next rank, the second edge to the previous rank."""
    rank = np.arange(num_ranks)
    return np.stack([(rank + 1) % num_ranks, (rank - 1) % num_ranks], -1)


def torus(num_ranks: int) -> np.ndarray:
    """Make a torus on the grid nearest to a square: one edge to the next column, one edge to the next row."""
    rows = max(r for r in range(1, int(num_ranks**0.5) + 1) if num_ranks % r == 0)
    rank = np.arange(num_ranks).reshape(rows, -1)
    return np.stack([np.roll(rank, -1, 1).ravel(), np.roll(rank, -1, 0).ravel()], -1)


def _by_parity(num_ranks: int, even: tuple[int, int], odd: tuple[int, int]) -> np.ndarray:
    """Make a cube graph: ranks of even bit parity copy along the bits ``even``, the others along ``odd``."""
    rank = np.arange(num_ranks)
    parity = np.bitwise_count(rank) % 2
    return np.stack([rank ^ np.where(parity, o, e) for e, o in zip(even, odd, strict=True)], -1)


def cube(num_ranks: int) -> np.ndarray:
    """Make the graph of the 12 edges and 4 long diagonals of a cube of 8 ranks, with two edges from and to each."""
    return _by_parity(num_ranks, (1, 2), (4, 7))


def hypercube(num_ranks: int) -> np.ndarray:
    """Make the graph of the 32 edges of a four-dimensional cube of 16 ranks, with two edges from and to each."""
    return _by_parity(num_ranks, (1, 2), (4, 8))


GRAPHS = {"ring": ring, "torus": torus, "cube": cube, "hypercube": hypercube}
"""The functions that make a graph for a number of ranks, by name."""
SIZES = {"cube": 8, "hypercube": 16}
"""The number of ranks of the graphs that exist for one number only."""


def default_graph(num_ranks: int, replica_slots: int) -> str:
    """Choose the best of LPLB's graphs for a domain; none of them has more than two edges per rank.

    ========================================  =========
    domain                                    graph
    ========================================  =========
    one replica slot per rank                 ring
    8 ranks                                   cube
    16 ranks                                  hypercube
    6 ranks or more with a divisor            torus
    any other                                 ring
    ========================================  =========

    On four ranks every second edge of a torus leads back: on recorded loads of 4 nodes x 4 ranks with two slots, its
    imbalance is 1.25 and that of a ring 1.15. From six ranks on, torus and cubes balance better than a ring with two
    slots.

    Args:
        num_ranks: P, the number of ranks of the domain.
        replica_slots: R, the number of replica slots of a rank.

    Returns:
        A key of `GRAPHS`.
    """
    if replica_slots < 2:
        return "ring"
    for name, size in SIZES.items():
        if num_ranks == size:
            return name
    prime = all(num_ranks % divisor for divisor in range(2, int(num_ranks**0.5) + 1))
    return "ring" if prime or num_ranks < 6 else "torus"


def graph_edges(name: str | None, num_ranks: int, replica_slots: int) -> Int[np.ndarray, "P d"]:
    """Return the ranks to which each rank copies its heaviest, second heaviest, ... expert.

    Every column is a permutation of the ranks, so column ``k`` fills replica slot ``k`` of every rank.

    Args:
        name: the name of the graph, a key of `GRAPHS`. None takes `default_graph`.
        num_ranks: P, the number of ranks of the domain.
        replica_slots: R, the largest number of columns to return.

    Returns:
        The ranks at the ends of the edges.

    Raises:
        ValueError: if ``name`` is unknown, or if the graph is for a different number of ranks.

    >>> graph_edges("ring", 4, 1).tolist()
    [[1], [2], [3], [0]]
    """
    name = name or default_graph(num_ranks, replica_slots)
    if name not in GRAPHS:
        raise ValueError(f"graph={name!r} must be one of {', '.join(GRAPHS)}")
    if num_ranks != SIZES.get(name, num_ranks):
        raise ValueError(f"graph={name!r} is for {SIZES[name]} ranks, but the domain has {num_ranks}")
    return GRAPHS[name](num_ranks)[:, :replica_slots]
