"""Short scripts for training loops that are not ours."""
