"""Views: parse the request, call a selector or a service, render. One file per screen."""
