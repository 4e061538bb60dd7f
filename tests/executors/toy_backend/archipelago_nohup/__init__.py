"""The backend ``nohup``: detached processes."""
