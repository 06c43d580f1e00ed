"""Grouped SwiGLU MLPs, in one file for each implementation."""
