"""Models of the time that a plan takes and of the memory that it needs; nothing here was measured on a cluster.

=================  ==================================================================================================
`cost_model`       what a batch is priced for, and the seconds of one unit of each kind of work: the only price
`batch_time`       the time of a batch under its plan, and of balanced runs
`step_time`        the time of its layers: attention, experts, exchange, and the part of replica transfers that
                   attention does not hide
`copies`           the time to transfer experts: replicas, residents, and experts that change home
`traffic`          the rows and experts that ranks send and receive
`least_time`       a lower bound of the time of a batch over all plans
`least_crossings`  a lower bound of the crossings between nodes
`memory`           the memory of a rank
`hardware`         named clusters
`models`           named models
=================  ==================================================================================================
"""
