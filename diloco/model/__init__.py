"""The model as flat vectors, fragments, and the state of the outer and inner optimizers."""
