"""Alternatives to parts of ReLibra's planner, other searches and token splits, that measure the value of each part."""
