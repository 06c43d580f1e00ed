"""What each part of ReLibra's planner is worth: ``python -m experiments.ablation [TRACE]``."""
