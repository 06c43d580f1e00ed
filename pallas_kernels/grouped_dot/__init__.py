"""Products of each group of rows with the matrix of its own slot; one file for each implementation."""
