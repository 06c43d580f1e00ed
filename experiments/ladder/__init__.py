"""A ladder of steps: each runs in its own process with a time limit, and its results are recorded immediately."""
