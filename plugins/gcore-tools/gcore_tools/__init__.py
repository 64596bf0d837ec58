"""Tools around a job: plans, checks of a machine, a demonstration, jobs to begin with."""
