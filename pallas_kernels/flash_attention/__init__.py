"""Attention of every query to a range of keys, without an array of all pairs of tokens."""
