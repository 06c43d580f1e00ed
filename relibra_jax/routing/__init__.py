"""What follows from a plan for the rows of ranks: where copies of tokens go, and how large buffers are."""
