"""The server on one machine: supervisor, child processes and embedded broker."""
