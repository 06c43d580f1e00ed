"""Alternatives to parts of ReLibra's planner: other searches, other token splits, to show what each part is worth."""
