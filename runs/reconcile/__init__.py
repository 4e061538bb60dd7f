"""The reconciler: compare a run with its wanted state, and act."""
