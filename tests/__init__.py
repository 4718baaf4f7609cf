"""The tests mirror the tree of `src/upper`; beside the mirror stand stories and rules of the whole."""
