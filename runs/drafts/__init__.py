"""What a person asks for before it is a run: kept, checked, forecast, and made into one."""
