"""The whole server on one machine: child processes, broker and supervisor."""
