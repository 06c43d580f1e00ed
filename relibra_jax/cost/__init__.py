"""The time that a plan takes and the memory that it needs, modelled: nothing here was measured on a cluster.

=================  ==================================================================================================
`batch_time`       what a batch takes under its plan, and the idealised bound
`step_time`        what its layers take: attention, experts, exchange, and what of replicas' transfers is not hidden
`copies`           experts that travel: replicas, residents, and those that change home
`traffic`          what ranks send and receive
`unit_times`       what one unit of work costs, for planners
`least_time`       what no plan of a batch is below, however it places experts and samples
`least_crossings`  what of it crosses between nodes
`memory`           what a rank holds
`hardware`         clusters
`models`           models
`choose_by_time`   planners that choose by modelled time
=================  ==================================================================================================
"""
