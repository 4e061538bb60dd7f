"""Actions of users and administrators on runs, replicas, tokens and accounts."""
