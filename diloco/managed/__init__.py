"""The parts of :class:`diloco.manager.Manager`: what a step's allreduce calls become (``wire``,
``exchange``, ``work``), how a round is agreed on (``session``), and states that travel (``states``,
``recovery``).
"""
