"""A check that the experts computed exactly the rows that the plan gave them."""

import numpy as np
from jaxtyping import Int

from relibra_jax.contract.types import Array
from relibra_jax.nnx.prepare_batch import group_by_copy
from relibra_jax.nnx.prepared import PreparedBatch, to_host


def check_executed(slot_rows: Int[Array, "M L *copies N G S"], batch: PreparedBatch) -> None:
    """Raise unless every slot computed exactly the number of rows in its quota. Runs on the host.

    If there are several processes, every process must call it.

    Args:
        slot_rows: the ``slot_rows`` of the layers' outputs (`relibra_jax.nnx.MoEOutput`), for all micro-batches and
            layers. With ``Balancer(check_rows=True)`` the receiving ranks have counted them. Otherwise they are copied
            from the plan, and this check always passes.
        batch: the batch, prepared from a replay, that the layers executed.

    Raises:
        ValueError: if ``slot_rows`` has a different shape than the plan.
        RuntimeError: if a slot computed a different number of rows than its quota. The message has the first such slot.
    """
    plan = batch.batch_plan.plan
    quota, expert = (
        np.asarray(leaf) for leaf in group_by_copy((plan.quota, plan.slot_expert), batch.parallel.copies)
    )
    rows = to_host(slot_rows)
    if rows.shape != quota.shape:
        raise ValueError(f"slot_rows: expected shape {quota.shape}, found {rows.shape}")
    if (rows != quota).any():
        place = tuple(np.argwhere(rows != quota)[0].tolist())
        copies = "".join(f"copy {index} of the group, " for index in place[2:-3])
        raise RuntimeError(
            "micro-batch {}, layer {}, {}node {}, rank {}, slot {}".format(*place[:2], copies, *place[-3:])
            + f": expert {expert[place]} computed {rows[place]} rows, but the plan's quota is {quota[place]}"
        )
