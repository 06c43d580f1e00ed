"""The price of one MoE layer, operation by operation."""
