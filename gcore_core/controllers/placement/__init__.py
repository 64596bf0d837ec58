"""Who is awake in a rollout, and on which devices."""
