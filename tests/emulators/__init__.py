"""Local servers that speak the protocols of serverless backends, for tests and demonstrations.

Each really starts the process it is asked to start, on this machine, and ends it the ways its
backend would: preempted, out of memory, at its deadline. The clients' real SDKs talk to them over
real connections. ``python -m tests.emulators NAME`` serves one; :mod:`tests.emulators.processes` is
what they run their jobs with. Nothing here is used by a deployment.
"""
