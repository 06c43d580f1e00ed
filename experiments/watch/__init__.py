"""The page of a training run: ``python -m experiments.watch RUN`` writes or serves it."""
