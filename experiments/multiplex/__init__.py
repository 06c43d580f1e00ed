"""A planner with a simulator, as an experiment: how reinforcement-learning jobs share a cluster.

Source: RollMux (arXiv 2512.11306).

The rollout devices of a job wait while it trains, and its training devices wait while it generates. The jobs of a group
alternate on one rollout pool and one training pool, and keep their states in host memory. The durations of jobs may be
those of recorded runs, and the moves of their states are measured. All else is modelled; nothing runs on a cluster.

=============  ======================================================================================================
`jobs`         descriptions of jobs, and of the pools of nodes that they run on
`job_sources`  jobs from files, and jobs drawn at random for comparisons
`run_metrics`  jobs from the metrics of training runs
`parking`      the measured bytes and seconds of moving the state of a run to host memory and back
`park`         the program that measures them
`groups`       jobs that share two pools: their period, price, and whether all keep their objectives
`grouping`     forming groups: jobs one by one, each where it costs least; or the cheapest groups of a few jobs
`baselines`    two other ways to run jobs, and the price and work of each way: separate pools, and co-location
`comparison`   all ways to run the same jobs, compared
`simulation`   simulation of a group, phase by phase, with any durations
`tables`       the tables and sentences that the program prints
`figure`       the figure of a group
=============  ======================================================================================================
"""
