"""The benchmark of the Hopper kernels on a GPU: results are checked, then timed beside those of other kernels."""
