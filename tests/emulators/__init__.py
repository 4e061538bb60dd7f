"""Local servers that speak the protocols of serverless backends, for tests and demonstrations.

Each starts a job as a process of this machine, and ends it like its backend: preempted, out of
memory, at its deadline. The real SDKs connect to them over real connections. ``python -m
tests.emulators NAME`` serves one backend. :mod:`tests.emulators.processes` runs the jobs, and
:mod:`tests.emulators.http_server` serves all of them but Modal's gRPC. No deployment uses them.
"""
