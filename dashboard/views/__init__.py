"""Views: parse the request, call a query or an action, render. One module per screen."""
