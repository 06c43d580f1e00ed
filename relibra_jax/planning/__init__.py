"""Planning: pure functions from loads to plans, without devices and without execution."""
