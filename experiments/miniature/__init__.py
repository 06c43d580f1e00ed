"""A small cluster on one Linux machine: real processes, a real slow network."""
