"""When predicting the routes of inference pays: accuracy, overhead and gain of predictors, as MoE-GPS draws them.

Source: MoE-GPS (arXiv 2506.07366). All times are modelled.

==========  =========================================================================================================
`loads`     loads like those of prefill and of decoding, from the samples of a trace
`prices`    the time of a layer under a prediction, in the parts of the paper, at several speeds of the network
`figure`    the figure: accuracy and overhead, time by parts, and which prediction pays by skew and speed
==========  =========================================================================================================
"""
