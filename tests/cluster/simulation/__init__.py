"""Whole clusters in one process, from seeds: `world` has time, agreement and promises, `node` one node."""
