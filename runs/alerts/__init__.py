"""Alert rules, stored alerts and webhooks."""
