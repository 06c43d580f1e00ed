"""Pallas kernels for NVIDIA GPUs from compute capability 8.0 on, which Triton compiles for whatever GPU is there.

Other than the Hopper kernels, these have one block for each tile of the output, and leave the pipeline of copies to
Triton's compiler. The grid has room for any split of the rows, so its size is known before the group sizes are: the
host waits for nothing. Widths may be any number.
"""
