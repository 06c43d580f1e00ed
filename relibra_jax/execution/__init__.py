"""What runs a plan: expert parallelism over a device mesh with a node and a local axis."""
