"""How values are shown: numbers, dates, states and progress."""
