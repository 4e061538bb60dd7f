"""Implementation of :mod:`diloco.manager`, a Manager with torchft's interface."""
