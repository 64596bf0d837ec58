"""What a run leaves behind and shows: its directory, its metrics, the terminal, the summary, the
export.
"""
