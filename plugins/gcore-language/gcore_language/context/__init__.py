"""Attention over sequences that several ranks share.

settings    what may be set, and what does not go together; imports no torch
layout      which tokens of a packed row each rank holds
kernels     attention of one stretch of queries to one stretch of keys, forward and backward
ring        keys and values travel around a ring of ranks
ulysses     ranks swap tokens for heads
groups      the process groups of a mesh data x ring x ulysses
attention   the whole of it, and its name in transformers' attention interface
packing     micro-batches of whole records, one after another in a single row
policy      a policy whose ranks share each micro-batch
"""
