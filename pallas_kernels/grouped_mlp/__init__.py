"""A SwiGLU MLP for each group of rows: one call and gradient, several implementations (a file each)."""
