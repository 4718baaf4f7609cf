"""Every test of this room runs over both kernels, and `test_twins` runs them against each other."""
