"""S3 backend of kvstore: a tier in a bucket, shared by machines."""
