"""The S3 backend of kvstore."""
