"""The time that a plan takes, modelled: nothing here was measured on a cluster."""
