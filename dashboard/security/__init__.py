"""Protection of requests: body limits, trusted proxies, sign-in limits, the setup token and the
audit log."""
