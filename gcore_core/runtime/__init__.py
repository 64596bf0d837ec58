"""Holds what several rooms share: messages, settings of workers, journals. It knows no YAML."""
