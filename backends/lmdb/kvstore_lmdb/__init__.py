"""LMDB backend of kvstore: a shared, persistent tier in one memory-mapped file."""
