"""How processes are started, checked and ended."""
