"""L1: KV blocks in this process's memory, pinned by leases, evicted by a policy."""
