"""Says how much of a run the page shows, and the sentences by which the page says it.

A run may have any number of steps and records; the page has to open at once and to fit into a mail.
"""

from __future__ import annotations

#: Points of one curve: of each of half as many spans, the lowest and the highest value.
CURVE_POINTS = 1000
#: Columns of a heat map: a column is the mean of the steps in it.
MAP_COLUMNS = 400

#: Evaluated answers, and the characters of their prompts and texts together.
ANSWERS = 20_000
ANSWER_CHARACTERS = 24_000_000
#: Characters of one prompt or text.
TEXT_CHARACTERS = 20_000

#: Records whose tokens are shown, and tokens of one of them.
TOKEN_RECORDS = 500
TOKENS = 2048

#: Pictures, the pixels of their longer side, and the bytes of all of them.
PICTURES = 240
PICTURE_PIXELS = 256
PICTURE_BYTES = 4 << 20

#: The last steps whose every stage is drawn, and the bytes at a trace's end that are read.
TIMELINE_STEPS = 12
TRACE_BYTES = 64 << 20
