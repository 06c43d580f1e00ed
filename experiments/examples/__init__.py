"""Short scripts to copy from, with the planner and the balanced layers in external training loops."""
