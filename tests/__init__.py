"""The tests mirror the tree of `src/upper`; `scenarios`, `fuzz` and `docs` cover several packages at once."""
