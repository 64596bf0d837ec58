"""Core code around a backend in its worker: waits for the controllers, runs the backend, moves
columns and weights.
"""
