"""Planning: pure functions that compute a plan from the loads of a batch, without a device mesh.

`plan_batch` plans a whole batch: it alternates the assignment of samples (`assignment`) with a planner's choice of
homes, replicas and quotas. The planner `relibra` composes `placement`, which reorders experts between batches, and
`replication`, which replicates them inside a batch. `planners` is the table of all planners, `baselines` has those of
other systems, and `metrics` measures plans. `relibra_jax.contract.types` defines the terms and the types.
"""
