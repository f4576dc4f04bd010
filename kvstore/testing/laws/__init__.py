"""The laws of :class:`kvstore.testing.BackendConformance`, by subject; each class is a part of the suite."""
