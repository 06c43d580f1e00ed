"""Ahead-of-time checks: XLA compiles the execution programs for a described GPU cluster; the checks read the result."""
