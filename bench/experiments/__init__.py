"""What ``bench/quality.py`` and ``bench/chaos.py`` are made of."""
