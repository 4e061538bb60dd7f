"""What deserves attention: the rules, the book of alerts, and who is told."""
