"""Has the commands that this distribution adds to ``g-core``, a plugin each."""
