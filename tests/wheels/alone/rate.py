"""Opens the page on which people compare the answers of a run, and reads it."""

import re
import subprocess
import sys
from urllib.request import HTTPCookieProcessor, build_opener

command = [sys.executable, "-u", "-m", "gcore_core", "human", "rate", sys.argv[1], "--port", "0"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    try:
        address = next(
            found[1] for line in process.stdout if (found := re.match(r"open (\S+)", line))
        )
        page = build_opener(HTTPCookieProcessor()).open(address, timeout=60).read().decode()
    finally:
        process.terminate()
assert "<html" in page, page
