"""Ablation of ReLibra's planner: alternative searches and token splits, which show the value of each part."""
