"""Questions across runs: lists, search, comparison, pages, exports, metrics."""
