"""upper."""
