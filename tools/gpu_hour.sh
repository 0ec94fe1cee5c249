#!/bin/sh
# Asks a GPU that is lent for ten minutes the questions of an hour: tools/gpu_hour.sh HOUR --out=DIR
# [--tiny]. benchmarks/gpu.py says what they are, and what DIR gets.
hour=${1:?hour 1, 2, 3 or 4}
shift
cd "$(dirname "$0")/.." || exit
exec "${PYTHON:-python3}" -m benchmarks.gpu --hour="$hour" "$@"
