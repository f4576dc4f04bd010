"""LMDB backend of kvstore."""
