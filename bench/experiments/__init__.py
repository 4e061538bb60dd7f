"""The training-quality experiments of ``bench/quality.py``: what is compared, how it is trained,
and where results are kept."""
