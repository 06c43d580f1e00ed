"""What ran, held to its plan."""

import numpy as np
from jaxtyping import Int

from relibra_jax.nnx.prepare_batch import by_copy
from relibra_jax.nnx.prepared import PreparedBatch, to_host
from relibra_jax.types import Array


def check_executed(slot_rows: Int[Array, "M L *copies N G S"], batch: PreparedBatch) -> None:
    """Raise unless the rows that every slot computed are exactly the plan's quotas. Runs on the host.

    On several processes, all call it.

    Args:
        slot_rows: what the layers returned (`relibra_jax.nnx.MoEOutput`), of all micro-batches and layers: counted
            where rows arrived with ``Balancer(check_rows=True)``; without, they are what the plan says.
        batch: the prepared batch that ran in replay.

    Raises:
        ValueError: if the rows are of other shapes than the plan.
        RuntimeError: at the first place where they differ, with both numbers.
    """
    plan = batch.batch_plan.plan
    quota, expert = (
        np.asarray(leaf) for leaf in by_copy((plan.quota, plan.slot_expert), batch.parallel.copies)
    )
    rows = to_host(slot_rows)
    if rows.shape != quota.shape:
        raise ValueError(f"slot_rows: expected shape {quota.shape}, found {rows.shape}")
    if (rows != quota).any():
        place = tuple(np.argwhere(rows != quota)[0].tolist())
        copies = "".join(f"copy {index} of the group, " for index in place[2:-3])
        raise RuntimeError(
            "micro-batch {}, layer {}, {}node {}, rank {}, slot {}".format(*place[:2], copies, *place[-3:])
            + f": expert {expert[place]} computed {rows[place]} rows, the plan's quota is {quota[place]}"
        )
