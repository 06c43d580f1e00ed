"""Measure updates on two processes as two nodes, under several planners: time, and bytes between the nodes."""
