"""What the scripts that measure the exchange share."""
