"""The reconciler: compares a run's actual state with its desired state and acts on differences."""
