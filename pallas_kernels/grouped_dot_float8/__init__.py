"""Grouped products of float8 operands with scales of blocks, in one file for each implementation."""
