"""The HTTP API: everything the pages can do, for programs. ``docs/api.md`` introduces it and
``/api/openapi.json`` describes it in full.

An operation parses its request, calls the domain and returns rows. Authorization checks the scopes
of a token first, then the role of its owner.
"""

from dashboard.api.site import api, urlpatterns

__all__ = ["api", "urlpatterns"]
