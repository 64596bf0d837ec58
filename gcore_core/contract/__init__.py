"""All that the author of a plugin imports; it imports nothing else of the project."""
