"""Planning how to serve a mixture-of-experts model for rollout. All times are modelled; none was measured on a cluster.

===================  =================================================================================================
`deployments`        search for the devices and micro-batches in flight that give the most tokens per second and price
`expert_devices`     placement of experts and replicas on expert devices, from recorded routing
`phase_times`        times of attention, experts and the transfer between them, in one layer of one micro-batch
`device_memory`      memory of attention devices and of expert devices
`infeasible`         the error for a search in which no deployment is feasible
`ping_pong`          the schedule of micro-batches between attention and experts: in closed form, and event by event
`simulated_step`     the schedule of a deployment with the loads of drawn micro-batches
`drawn_batches`      micro-batches of decoding, drawn from a recorded trace
===================  =================================================================================================
"""
