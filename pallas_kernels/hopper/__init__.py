"""Grouped products in Pallas for Hopper (Mosaic GPU): what the kernels of `grouped_dot` and `grouped_mlp` share.

Shown so far in JAX's GPU interpreter, with race detection, and by compiling for sm_90 without a device. They have not
run on a GPU yet: `experiments.bench_gpu` checks results before it times, and is the first thing to run on one.
"""
