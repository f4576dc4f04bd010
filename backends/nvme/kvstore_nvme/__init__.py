"""The NVMe backend of kvstore."""
