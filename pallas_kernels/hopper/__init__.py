"""Pallas kernels for Hopper GPUs (Mosaic GPU) that `grouped_dot` and `grouped_mlp` are made of.

`row_product_kernel` multiplies the rows of each group by matrices, `weight_gradient_kernel` sums outer products of
rows; both are built on `persistent_kernel`.

They are tested in JAX's GPU interpreter, with race detection, and compiled for sm_90 without a device. They have not
run on a GPU yet: `experiments.bench_gpu` checks results before it times, and is the first thing to run on one.
"""
