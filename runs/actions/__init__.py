"""What users and administrators do to runs, replicas, tokens and accounts."""
