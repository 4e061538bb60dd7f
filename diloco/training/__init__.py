"""The round loop of a replica, its state, checkpoints and the final export."""
