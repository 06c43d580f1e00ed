"""The Pallas kernels for NVIDIA GPUs of compute capability 8.0 or higher, compiled by Triton for the available GPU.

Unlike the Hopper kernels, they have one block for each tile of the output, and Triton's compiler pipelines the copies.
The grid is large enough for any split of the rows, so its size does not depend on the group sizes, and the host does
not wait for them. Widths may have any size.
"""
