"""The Pallas kernels for Hopper GPUs (Mosaic GPU) behind `grouped_dot` and `grouped_mlp`.

`row_product_kernel` multiplies the rows of each group by matrices. `weight_gradient_kernel` sums outer products of
rows. Both are built on `persistent_kernel`. `tile_sizes` chooses the sizes of their tiles, from a model of cycles or
from the measurements of `autotune`. `multiprocessors.leave_multiprocessors` keeps some multiprocessors free for
collectives.

The kernels are tested in JAX's GPU interpreter, with race detection, and compiled for sm_90 without a device. On an
H200 they were right, and as fast as `experiments/results/kernels/gpu.md` says. ``python -m experiments.gpu_day`` checks
results before it measures times. ``implementation=None`` does not choose the kernels before they pass
`pallas_kernels.self_check`.

Ping-pong scheduling is not implemented: two warpgroups would alternate, one writing its own tile while the other
multiplies. Two tiles of 64 rows load their matrices twice. By the model of `tile_sizes`, at 38 bytes per cycle, this
costs more than the overlapped writing saves, at all shapes with 1,024 rows per group.
"""
