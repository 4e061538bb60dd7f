"""From a form or document to a stored run."""
