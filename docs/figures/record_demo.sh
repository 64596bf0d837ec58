#!/usr/bin/env bash
# Records docs/figures/demo.svg: the demo as a terminal shows it, without the seconds in which nothing moves.
# Run it from the root of a checkout whose .venv has G-Core. The recorder gets a venv of its own, which is removed.
set -euo pipefail
recorder=$(mktemp -d)
trap 'rm -rf "$recorder"' EXIT
python3 -m venv "$recorder"
"$recorder/bin/pip" install --quiet termtosvg==1.1.0 "setuptools<81"
"$recorder/bin/termtosvg" docs/figures/demo.svg --command ".venv/bin/g-core demo --steps 20" \
    --screen-geometry 92x16 --min-frame-duration 100 --max-frame-duration 900 --loop-delay 6000 \
    --template window_frame
