"""Fixed graphs between ranks, along which LPLB copies experts.

Named after github.com/deepseek-ai/LPLB. A graph is an array ``edges[P d]``: rank ``p`` copies its heaviest experts
to ``edges[p, 0]``, ``edges[p, 1]``, ... Every column is a permutation of the ranks, so as many copies enter a rank
as leave it, and column ``k`` fills replica slot ``k`` of every rank.
"""

import numpy as np
from jaxtyping import Int


def ring(num_ranks: int) -> np.ndarray:
    """Copies to the next rank, then to the previous one."""
    rank = np.arange(num_ranks)
    return np.stack([(rank + 1) % num_ranks, (rank - 1) % num_ranks], -1)


def torus(num_ranks: int) -> np.ndarray:
    """Copies to the next column, then to the next row, of the grid nearest to a square."""
    rows = max(r for r in range(1, int(num_ranks**0.5) + 1) if num_ranks % r == 0)
    rank = np.arange(num_ranks).reshape(rows, -1)
    return np.stack([np.roll(rank, -1, 1).ravel(), np.roll(rank, -1, 0).ravel()], -1)


def _by_parity(num_ranks: int, even: tuple[int, int], odd: tuple[int, int]) -> np.ndarray:
    """Ranks of even bit parity copy along two dimensions of a cube, the others along the remaining two."""
    rank = np.arange(num_ranks)
    parity = np.bitwise_count(rank) % 2
    return np.stack([rank ^ np.where(parity, o, e) for e, o in zip(even, odd, strict=True)], -1)


def cube(num_ranks: int) -> np.ndarray:
    """The twelve edges and four long diagonals of a cube of 8 ranks, two leaving and two entering each."""
    return _by_parity(num_ranks, (1, 2), (4, 7))


def hypercube(num_ranks: int) -> np.ndarray:
    """The 32 edges of a four-dimensional cube of 16 ranks, two leaving and two entering each."""
    return _by_parity(num_ranks, (1, 2), (4, 8))


GRAPHS = {"ring": ring, "torus": torus, "cube": cube, "hypercube": hypercube}
SIZES = {"cube": 8, "hypercube": 16}


def default_graph(num_ranks: int, replica_slots: int) -> str:
    """The graph for a domain when none is named: the best of LPLB's own, none of which has more than two edges a rank.

    ========================================  =========
    domain                                    graph
    ========================================  =========
    one replica slot a rank                   ring
    8 ranks                                   cube
    16 ranks                                  hypercube
    6 ranks or more with a divisor            torus
    any other                                 ring
    ========================================  =========

    On four ranks every second edge of a torus leads back: on recorded loads of 4 nodes x 4 ranks with two slots its
    imbalance is 1.25, that of a ring 1.15. From six ranks on, torus and cubes are ahead of a ring with two slots.
    """
    if replica_slots < 2:
        return "ring"
    for name, size in SIZES.items():
        if num_ranks == size:
            return name
    prime = all(num_ranks % divisor for divisor in range(2, int(num_ranks**0.5) + 1))
    return "ring" if prime or num_ranks < 6 else "torus"


def graph_edges(name: str | None, num_ranks: int, replica_slots: int) -> Int[np.ndarray, "P d"]:
    """Where each rank copies its first, second, ... heaviest expert.

    Every column is a permutation of the ranks, so column ``k`` fills replica slot ``k`` of every rank.

    Args:
        name: a key of GRAPHS; `default_graph` when None.
        num_ranks: P, the ranks of the domain.
        replica_slots: R, the most columns that are returned.

    Raises:
        ValueError: if the name is unknown, or the graph is for another number of ranks.

    >>> graph_edges("ring", 4, 1).tolist()
    [[1], [2], [3], [0]]
    """
    name = name or default_graph(num_ranks, replica_slots)
    if name not in GRAPHS:
        raise ValueError(f"graph={name!r} must be one of {', '.join(GRAPHS)}")
    if num_ranks != SIZES.get(name, num_ranks):
        raise ValueError(f"graph {name!r} joins {SIZES[name]} ranks, the domain has {num_ranks}")
    return GRAPHS[name](num_ranks)[:, :replica_slots]
