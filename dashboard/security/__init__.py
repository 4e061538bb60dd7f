"""What guards requests: body limits, proxies, sign-in limits, the set-up token and the audit
log."""
