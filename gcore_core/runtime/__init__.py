"""Has processes and what they carry: calls, the store, workers. It knows no YAML."""
