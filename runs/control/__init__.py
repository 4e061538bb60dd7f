"""What the workers do for runs: launch, watch, judge, relaunch, end."""
