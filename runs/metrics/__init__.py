"""Points and contributions: how they are packed into rows, and read again for charts."""
