"""Columns and blobs in shared memory: written once, opened by reference."""
