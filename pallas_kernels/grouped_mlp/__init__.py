"""A SwiGLU MLP of its own for each group of rows; one file for each implementation."""
