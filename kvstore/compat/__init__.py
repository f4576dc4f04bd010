"""Other libraries' interfaces over kvstore, for code that was written against them."""
