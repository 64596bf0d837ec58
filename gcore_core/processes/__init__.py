"""Processes and how they talk: supervisor, node agent, workers, rpc, store, weight pushes."""
