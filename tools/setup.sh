#!/usr/bin/env bash
# Makes a virtual environment with a pinned set and the project in it, or leaves a good one alone.
#
#   tools/setup.sh .venv requirements/dev.txt
#   tools/setup.sh .venv-docs requirements/docs.txt     for the site, without the project
#   tools/setup.sh .venv requirements/base.txt     what training needs alone; one with the larger set serves as it is
#
# The environment holds a stamp: where it lies, its extras, a hash of its requirements, and which set it has. Without a
# place in it the environment is half made, and is made anew; with another hash or other extras they are installed into it. Of two
# that start at once the second waits. EXTRAS=cuda (or rocm, hf,...; with commas) adds optional sets, which stay: delete
# the environment to be rid of one.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
pinned=$2
python=$venv/bin/python
stamp=$venv/.stamp
log=.cache/setup$venv.log
started=$SECONDS

say() { echo "setup: $*" >&2; }

recorded() { sed -n "$1p" "$stamp" 2>/dev/null || true; }

extras=$(printf '%s,%s' "$(recorded 2)" "${EXTRAS-}" | tr ' ' ',' | tr ',' '\n' | sed '/^$/d' | sort -u | paste -sd, -)
place=$PWD/$venv # the scripts in an environment hold its path
hash=$(cat pyproject.toml requirements/*.txt tools/setup.sh | cksum)

# The larger set stays where it is: who trains and tests in turns would else install in turns. Before stamps named their
# set, .venv had that of development.
had=$(recorded 4)
[ -n "$had" ] || { [ ! -f "$stamp" ] || had=requirements/dev.txt; }
if [ "$pinned" = requirements/base.txt ] && [ "$had" = requirements/dev.txt ]; then pinned=$had; fi

sound() { # made here, whole, by an interpreter that still runs and is the one asked for
  [ "$(recorded 1)" = "$place" ] || return 1
  local base
  base=$("$python" -I -c "import os, sys; print(os.path.realpath(sys.executable))" 2>/dev/null) || return 1
  [ -z "${PYTHON:-}" ] || [ "$base" = "$(tools/find_python.sh 2>/dev/null)" ]
}

current() { sound && [ "$(recorded 2)" = "$extras" ] && [ "$(recorded 3)" = "$hash" ] && [ "$(recorded 4)" = "$pinned" ]; }

note() { # the stamp: where the environment lies and of what it is made, or what is not done yet
  printf '%s\n' "$1" "$extras" "$2" "$pinned" >"$stamp"
}

lock() { # held until this script ends, however it ends
  if command -v flock >/dev/null 2>&1; then
    exec 9>".cache/setup$venv.lock"
    flock -n 9 || { say "waiting for another set-up of $venv"; flock 9; }
    return
  fi
  link=.cache/setup$venv.lock.pid # a symbolic link to the owner's process number: made and named in one motion
  until ln -s $$ "$link" 2>/dev/null; do
    if kill -0 "$(readlink "$link")" 2>/dev/null; then sleep 1; else rm -f "$link"; fi
  done
  trap 'rm -f "$link"' EXIT
}

run() { # a step whose output matters only if it fails
  local status=0
  "$@" >>"$log" 2>&1 || status=$?
  [ "$status" -eq 0 ] && return
  tail -n 25 "$log" >&2
  say "failed at: $*"
  say "the whole output is in $log; with the cause mended, run the same command again"
  exit 1
}

current && exit 0
mkdir -p .cache
lock
current && exit 0

: >"$log"
if sound; then
  if [ "$had" != "$pinned" ]; then say "$venv has the set of $had: adding to it"
  elif [ "$(recorded 2)" != "$extras" ]; then say "$venv has the extras '$(recorded 2)': adding to them, now '$extras'"
  else say "what $venv was made from has changed: bringing it up to date"; fi
  note "$place" unfinished
else
  interpreter=$(tools/find_python.sh)
  say "making $venv with $("$interpreter" -I --version)"
  rm -rf "$venv"
  run "$interpreter" -I -m venv "$venv"
  note unfinished unfinished # so that the extras stay known
fi
say "installing the set of $pinned (a minute or two)"
pip=("$python" -m pip install --quiet --disable-pip-version-check --no-input)
run "${pip[@]}" -r "$pinned"
# The site is made from the files, not from what they import.
[ "$pinned" = requirements/docs.txt ] || run "${pip[@]}" --no-build-isolation -r "$pinned" -e ".${extras:+[$extras]}"
note "$place" "$hash"
say "$venv is ready ($((SECONDS - started)) s)"
