#!/usr/bin/env bash
# Prints the path of the first CPython >= 3.12 that works; with none, says what to install and exits 2.
#
# Order: $PYTHON, python3, python3.13, python3.12, then the folders of pyenv and uv, newest first. A candidate counts
# only if it runs, reports its version and can make an environment: a version manager's shim can exist and fail.
set -u

read -r -d '' probe <<'PY'
import os, sys
if sys.version_info < (3, 12):
    sys.exit("is Python %d.%d" % sys.version_info[:2])
if sys.implementation.name != "cpython":
    sys.exit("is %s, not CPython" % sys.implementation.name)
try:
    import ensurepip, venv
except ImportError:
    sys.exit("cannot make an environment (on Debian and Ubuntu: install python3-venv)")
print(os.path.realpath(sys.executable))
PY

refused=""

# Prints the interpreter behind a command and ends the search, or notes why the command will not do.
try() {
  local command found
  command=$(command -v -- "$1" 2>/dev/null) || return 1
  if found=$("$command" -I -c "$probe" 2>&1) && [ -x "$found" ]; then
    printf '%s\n' "$found"
    exit 0
  fi
  refused+="  $command: $(printf '%s\n' "${found:-does not run}" | head -n 1)"$'\n'
}

if [ -n "${PYTHON:-}" ]; then
  try "$PYTHON"
  reason=$(printf '%s' "${refused:-no such command}" | sed 's/^ *//')
  echo "PYTHON=$PYTHON will not do ($reason), looking further" >&2
fi
for candidate in python3 python3.13 python3.12; do
  try "$candidate"
done

# One folder per installed version: 3.12.1 in pyenv's, cpython-3.12.1-linux-x86_64-gnu in uv's. The versions that the
# pinned set is tested on come first.
home=~ # right without $HOME too
pyenv=${PYENV_ROOT:-$home/.pyenv}/versions
uv=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$home/.local/share}/uv/python}
for version in 3.13 3.12 3; do
  while IFS= read -r folder; do
    try "$folder/bin/python3"
  done < <(for kept in "$pyenv/$version".* "$uv/cpython-$version".*; do echo "$kept"; done | sort -r -V)
done

cat >&2 <<EOT
zaya_jax needs CPython 3.12 or newer, and none was found. Looked at:
${refused:-  (no python3 at all)
}Install one, by any of these, and run the same command again:
  uv python install 3.12
  pyenv install 3.12
  apt install python3.12 python3.12-venv
or name one: make setup PYTHON=/path/to/python3.12
EOT
exit 2
