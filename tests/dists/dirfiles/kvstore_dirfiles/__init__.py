"""A kvstore backend that keeps each record in a file of its own."""
