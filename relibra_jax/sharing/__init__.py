"""How jobs of reinforcement learning share a cluster, planned from what their steps took: RollMux (arXiv 2512.11306).

A job's devices for rollout wait while it trains, and its devices for training wait while it generates. Jobs of a group
take turns on one rollout pool and one training pool, with their states kept in host memory. Everything here is modelled
from durations: nothing of it runs a cluster.

=============  ======================================================================================================
`jobs`         what is known of a job, and of the pools that it may run on
`groups`       jobs that share two pools: their period, their price, and whether all keep their objectives
`multiplex`    jobs admitted one by one, each where it costs least
`optimum`      the cheapest groups of all, for a few jobs
`baselines`    pools of each job's own, and phases one after the other on one pool; what ways of running cost and do
`simulation`   a group executed turn by turn, with durations of any kind
`run_metrics`  jobs described by the metrics of training runs
`job_files`    jobs described in files
`drawn`        jobs that are drawn, for comparisons
=============  ======================================================================================================
"""
