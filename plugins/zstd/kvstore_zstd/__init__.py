"""Lossless codecs of kvstore: zstd, planes, planes-base."""
