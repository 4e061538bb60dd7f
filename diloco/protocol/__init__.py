"""The rendezvous protocol: keys, records, settings and decisions, without torch or I/O loops."""
