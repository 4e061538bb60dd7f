"""Measures checkpoints: loss and perplexity on held-out tokens, and benchmarks of ``lm-eval``."""
