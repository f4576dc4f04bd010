"""Encryption at rest: AES-256-GCM around another codec."""
