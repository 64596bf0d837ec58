"""What backends of causal language models share; a library of plugins, not a plugin."""
