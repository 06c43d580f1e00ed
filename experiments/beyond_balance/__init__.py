"""Plans beside the idealised balanced run."""
