"""Gathers what the page of a run shows, from the run's files alone.

One module for each panel. Each has a function that takes the runs and returns plain values, which
travel to the browser as JSON: embedded in the file of ``g-core report``, or asked for one by one
from ``g-core watch``. All rules by which something is left out are in ``limits``.
"""
