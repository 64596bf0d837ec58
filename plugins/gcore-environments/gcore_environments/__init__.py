"""Lets a policy act over several turns in an environment, with tools, exact to the token."""
