"""Devices, cells, partitions: pure data, and the policies that decide over them."""
