"""Surrounds a backend in its worker: waits for controllers, runs the backend, moves data.

Data are the columns of records and the weights of pushes.
"""
