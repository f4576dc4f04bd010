"""kvstore for SGLang: a HiCache storage backend over any tiers that kvstore offers.

SGLang loads :class:`kvstore_sglang.storage.KVStoreHiCache` by its name::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvstore", "module_path": "kvstore_sglang.storage",
        "class_name": "KVStoreHiCache", "interface_v1": 1, "config": "/etc/kvstore.toml"}'

Only ``storage`` and ``running_server`` import SGLang.
"""
