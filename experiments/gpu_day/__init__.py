"""Checks, measurements and tuning of the kernels in half an hour on a GPU, in steps with a time limit each."""
