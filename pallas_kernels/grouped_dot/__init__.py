"""Grouped matrix products, in one file for each implementation."""
