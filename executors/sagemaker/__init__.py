"""Replicas as Amazon SageMaker training jobs."""
