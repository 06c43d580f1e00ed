"""Planning how to serve a mixture-of-experts model for rollout. All times are modelled; none was measured on a cluster.

===================  =================================================================================================
`serving`            what a search is asked: model, hardware, limits, and the values to try
`placements`         placement of experts and replicas on expert devices, from recorded routing
`costs`              times and memory of attention devices and of expert devices
`ping_pong`          the schedule of micro-batches between attention and experts: in closed form, and event by event
`deployments`        search for the devices and micro-batches in flight that give the most tokens per second and price
`simulated_step`     the schedule of a deployment with the loads of micro-batches drawn from a recorded trace
`best_deployments`   the best deployments with even, contiguous and planned experts
`report`, `figure`   what the program prints, writes and draws
===================  =================================================================================================
"""
