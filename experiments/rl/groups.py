"""Expert-parallel groups of a machine: the ranks over which experts are distributed, and the copies beside them."""

import re

from relibra_jax.support.limits import check_integer


def copies_of_machine(
    experts_over: str, nodes: int, ranks_per_node: int, *, fsdp: int, num_experts: int
) -> tuple[int, int]:
    """Divide a machine into expert-parallel groups of whole nodes.

    Args:
        experts_over: the size of a group, ``NODESxRANKS`` such as ``4x8``.
        nodes: the number of nodes of the machine.
        ranks_per_node: the number of ranks of each node.
        fsdp: the number of groups over which experts are sharded.
        num_experts: the number of logical experts of a layer.

    Returns:
        The number of nodes of a group, and the number of data-parallel copies of ``fsdp`` groups.

    Raises:
        ValueError: if ``experts_over`` is not of this form, groups do not divide the machine, experts do not divide
            over a group, or ``fsdp`` does not divide the number of groups. The message has the sizes that do.

    >>> copies_of_machine("4x8", 20, 8, fsdp=1, num_experts=128)
    (4, 5)
    >>> copies_of_machine("4x8", 16, 8, fsdp=4, num_experts=128)
    (4, 1)
    """
    check_integer("fsdp", fsdp, least=1)
    parts = re.fullmatch(r"(\d+)x(\d+)", experts_over)
    if parts is None:
        raise ValueError(f"experts_over={experts_over!r} must be NODESxRANKS, such as 4x8")
    group, ranks = map(int, parts.groups())
    fitting = [
        f"{size}x{ranks_per_node}"
        for size in range(1, nodes + 1)
        if nodes % (size * fsdp) == 0 and num_experts % (size * ranks_per_node) == 0
    ]
    if experts_over not in fitting:
        sizes = f"what fits is {', '.join(fitting)}" if fitting else "no size fits"
        raise ValueError(
            f"experts_over={experts_over}: groups of whole nodes must divide {nodes} nodes x {ranks_per_node} ranks"
            f" into a multiple of fsdp={fsdp} groups, and {num_experts} experts must divide over the {group * ranks}"
            f" ranks of a group; {sizes}"
        )
    return group, nodes // (group * fsdp)
