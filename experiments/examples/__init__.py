"""Short scripts to copy from: the planner and the balanced layers in other people's training loops."""
