"""The API: everything the pages can do, for programs. ``docs/api.md`` tells of it, and
``/api/openapi.json`` in full.

Operations parse, call and answer, as the views do; the rows are the same. Each one asks who may do
it: a token's scopes first, then the role of its owner.
"""

from dashboard.api.site import api, urlpatterns

__all__ = ["api", "urlpatterns"]
