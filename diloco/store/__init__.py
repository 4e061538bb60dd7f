"""Object stores: the :class:`~diloco.store.base.Store` protocol and its implementations."""
