"""Pallas kernels for Hopper GPUs (Mosaic GPU) that `grouped_dot` and `grouped_mlp` are made of.

`row_product_kernel` multiplies the rows of each group by matrices, `weight_gradient_kernel` sums outer products of
rows; both are built on `persistent_kernel`. `tile_sizes` chooses their tiles by a count of cycles or by what `autotune`
measured; `multiprocessors.leave_multiprocessors` keeps some of the GPU free for collectives.

They are tested in JAX's GPU interpreter, with race detection, and compiled for sm_90 without a device. They have not
run on a GPU yet: ``python -m experiments.gpu_day`` checks results before it times, and is the first thing to run on
one. Nothing chooses them by itself before they have passed `pallas_kernels.self_check` there.

Warpgroups that take turns, each with a tile of its own of which one is written while the other is multiplied
(ping-pong), are not built. Two tiles of 64 rows load their matrices twice: counted as `tile_sizes` counts, at 38 bytes
a cycle, that costs more than the hidden writing saves at all shapes of 1,024 rows a group.
"""
