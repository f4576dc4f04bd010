"""L2: tiers over storage backends, their write queues, readers and guards."""
