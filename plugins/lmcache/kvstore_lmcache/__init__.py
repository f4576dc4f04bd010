"""kvstore for LMCache: a remote connector and an L2 adapter over any kvstore config.

``kvstore_lmcache.connector`` and ``kvstore_lmcache.l2_adapter`` are what LMCache loads and need it
installed; everything else in this package does not.
"""
