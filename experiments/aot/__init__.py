"""Ahead-of-time checks of the execution half on a described cluster: XLA compiles for GPUs that are not there."""
