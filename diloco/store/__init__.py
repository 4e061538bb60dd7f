"""The object store: a few verbs over a bucket or a folder, and what implements them."""
