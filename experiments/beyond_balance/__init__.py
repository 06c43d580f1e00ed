"""Compare plans with the idealised balanced run."""
