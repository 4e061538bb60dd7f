"""The bootstrap of a container: install requirements, fetch code, start the replica."""
