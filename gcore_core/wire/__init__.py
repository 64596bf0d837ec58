"""Lets processes call each other: services, peers, frames on sockets."""
