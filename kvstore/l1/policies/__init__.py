"""Built-in L1 eviction policies; they enter through the plugin door like anybody else's."""
