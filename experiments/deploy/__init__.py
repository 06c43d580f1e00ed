"""A planner with a simulator, as an experiment: how to serve a mixture-of-experts model for rollout.

Source: MegaScale-Infer (arXiv 2504.02263). All times are modelled; none was measured on a cluster. What is executed is
one decoding step of a small model with attention and experts on disjoint devices.

===================  =================================================================================================
`serving`            what a search is asked: model, hardware, limits, and the values to try
`placements`         placement of experts and replicas on expert devices, from recorded routing
`costs`              times and memory of attention devices and of expert devices
`ping_pong`          the schedule of micro-batches between attention and experts: in closed form, and event by event
`deployments`        search for the devices and micro-batches in flight that give the most tokens per second and price
`simulated_step`     the schedule of a deployment with the loads of micro-batches drawn from a recorded trace
`best_deployments`   the best deployments with even, contiguous and planned experts
`report`, `figure`   what the program prints, writes and draws
`decode_step`        one decoding step, executed, with two micro-batches between attention and experts
`row_swap`           its exchange between the two sides
===================  =================================================================================================
"""
