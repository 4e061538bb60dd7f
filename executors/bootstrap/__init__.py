"""What a container runs first: fetch code, install requirements, start the replica."""
