"""Half an hour of a GPU, used well: kernels are checked, timed and tuned in steps, each a process with a clock."""
