#!/usr/bin/env bash
# The compilers of JAX's GPU backends for a machine without a GPU: `experiments.compile --target=mi300x|h200|...` loads
# them from .venv-targets. The folder is no environment that programs start in: an installed plugin would be asked for
# its GPUs by every JAX program. With them comes NVIDIA's disassembler, 5 MB; LLVM's, for AMD, is the machine's own.
#
#   tools/setup_targets.sh .venv .venv-targets
#
# XLA's plugin for ROCm is linked to ROCm's libraries. Where a machine lacks them, stand-ins take their place: they
# hold the names, and every call of them returns an error. Compiling calls none but a few, which it survives.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1/bin/python
folder=$2
stamp=$folder/.stamp
version=$("$python" -c "import jax; print(jax.__version__)")
made="jax $version, tools/setup_targets.sh $(cksum <tools/setup_targets.sh)"

say() { echo "setup-targets: $*" >&2; }

[ "$(cat "$stamp" 2>/dev/null)" = "$made" ] && exit 0
if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
  say "the plugins are made for Linux on x86-64 only; this is $(uname -s) on $(uname -m)"
  exit 1
fi
for program in gcc nm readelf; do
  command -v $program >/dev/null || { say "$program is missing; install your system's gcc and binutils"; exit 1; }
done

rm -rf "$folder"
mkdir -p "$folder"
say "installing the plugins of jax $version for CUDA and ROCm (850 MB unpacked)"
"$python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps --no-compile --target "$folder" \
  "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version" "jax-rocm7-plugin==$version" "jax-rocm7-pjrt==$version" \
  "nvidia-cuda-nvdisasm>=13,<14"

say "making stand-ins for ROCm's libraries"
plugin=$(echo "$folder"/jax_plugins/xla_rocm*/xla_rocm_plugin.so)
mkdir "$folder/standins"
libraries=$(readelf -d "$plugin" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' |
  grep -vE '^(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|ld-linux.*)\.so')
for library in $libraries; do
  echo | gcc -shared -fPIC -x c - -Wl,-soname,"$library" -o "$folder/standins/$library"
done
nm -D --undefined-only "$plugin" | awk '$1 != "w" {print $2}' | grep -vE '@(GLIBC|GLIBCXX|CXXABI|GCC)_' |
  sed -E 's/@.*//; s/.*/long &(void) { return 1; }/' |
  gcc -shared -fPIC -w -fno-builtin -x c - -o "$folder/standins/names.so"

echo "$made" >"$stamp"
say "$folder is ready ($SECONDS s)"
