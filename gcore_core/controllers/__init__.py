"""The step programs. They know no backend and no algorithm; they hold headers and forward
references.
"""
