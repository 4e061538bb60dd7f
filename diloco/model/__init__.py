"""A model as flat vectors, and the outer and inner optimizer state."""
