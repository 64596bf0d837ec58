"""Names what plugins may use of the core besides the contract, by what it is for.

    gcore_core.kits.programs    step programs, and the parts that they are made of
    gcore_core.kits.launching   launchers: starting processes, networks, the node agent's messages
    gcore_core.kits.processes   what an agent started, and the end of what it has left
    gcore_core.kits.wire        launchers: connections of one's own between processes of a run
    gcore_core.kits.commands    commands and the check hook: plans, plugins, interpreters, tables
    gcore_core.kits.planning    tools that plan a job: where its workers go, what its files say
    gcore_core.kits.calls       calls of a run from Python: its process, its progress, its directory
    gcore_core.kits.models      backends that need a model which a function of the user makes
    gcore_core.kits.cache       what is kept between runs: in which directory, files replaced whole
    gcore_core.kits.runs        tools that look at a run: its settings, its checkpoints, its weights

The distribution gcore-testing has what plugins are tested with. What stands elsewhere in the core
may change without notice.
"""
