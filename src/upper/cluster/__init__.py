"""Several nodes as one: the bucket map, agreement on it, and the decisions that change it."""
