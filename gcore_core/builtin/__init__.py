"""Is the plugin ``core``: it offers what the core brings, through the same hooks as any plugin."""
