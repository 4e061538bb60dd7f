"""What a replica reports about itself."""
