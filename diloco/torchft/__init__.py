"""The parts of the torchft-shaped Manager (:mod:`diloco.manager`)."""
