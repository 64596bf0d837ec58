"""G-Core from Python: ``gcore.train``, ``gcore.job``, ``gcore.run``, ``gcore.load``.

A call becomes a job, the same YAML that ``g-core run`` takes, and the job runs in processes of its
own. What a notebook defines travels as source text in files beside that YAML, never pickled.
"""
