"""The plugin ``core``: what the core itself offers, through the same hooks as anybody."""
