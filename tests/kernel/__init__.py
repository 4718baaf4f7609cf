"""Every test of this package runs over both kernels, and `test_twins` runs them against each other."""
