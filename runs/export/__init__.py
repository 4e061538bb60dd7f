"""Publishes a checkpoint as a model on the Hugging Face Hub."""
