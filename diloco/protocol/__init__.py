"""The protocol on the object store: keys, records, settings and decisions. Torch-free; servers and
replicas share it."""
