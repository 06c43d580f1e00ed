"""Serving a mixture-of-experts model for rollout, as planning: modelled, nothing here was measured on a cluster.

===================  =================================================================================================
`deployments`        which attention and expert devices, and how many micro-batches in flight, give most for their price
`expert_devices`     experts and replicas placed over expert devices from recorded routing
`phase_times`        what attention, experts and the transfer between them take in one layer of one micro-batch
`device_memory`      what the devices of either side hold
`infeasible`         why no deployment is feasible
`ping_pong`          the schedule of micro-batches between the two sides: in closed form, and event by event
`simulated_step`     a deployment's schedule with the loads of drawn micro-batches
`drawn_batches`      micro-batches of decoding, drawn from a recorded trace
===================  =================================================================================================
"""
