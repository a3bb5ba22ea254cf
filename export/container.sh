#!/usr/bin/env bash
# container.sh IMAGE EXTRAS COMMAND...: a command of this checkout in one of NVIDIA's images, with its GPU and TensorRT.
#
# The checkout is mounted, so what the command writes under runs/ stays, as this user's. Packages (the project's EXTRAS,
# such as "export" or "train,export,serve") go into the container's own /tmp and vanish with it. With GPU_RUNTIME=1
# onnxruntime gives way to onnxruntime-gpu.
set -euo pipefail
if [ $# -lt 3 ]; then
  echo "usage: $0 IMAGE EXTRAS COMMAND..., such as: $0 nvcr.io/nvidia/tensorrt:26.05-py3 export bertship plan runs/export/squad" >&2
  exit 2
fi
command -v docker >/dev/null || { echo "error: docker is not on the PATH; it starts NVIDIA's image $1" >&2; exit 2; }
image=$1 extras=$2
shift 2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# inside: Triton's image has TensorRT's libraries and no Python package of theirs, so that of the same version is fetched
inside='set -euo pipefail
export PATH=/tmp/.local/bin:$PATH
pip() { python3 -m pip --quiet --disable-pip-version-check "$@"; }
pip install --user -c requirements/constraints.txt ".[$1]"
if [ "${GPU_RUNTIME:-}" = 1 ]; then
  pip uninstall --yes onnxruntime
  pip install --user -c requirements/constraints.txt onnxruntime-gpu
fi
if ! python3 -c "import tensorrt" 2>/dev/null; then
  version=$(dpkg-query -W -f="\${Version}\n" "libnvinfer[0-9]*" 2>/dev/null | head -1 | cut -d- -f1)
  pip install --user "tensorrt${version:+==$version}"
fi
shift
exec "$@"'

exec docker run --rm --gpus all --ipc=host --user "$(id -u):$(id -g)" \
  -e HOME=/tmp -e PYTHONPATH=/bertship -e PIP_BREAK_SYSTEM_PACKAGES=1 -e GPU_RUNTIME="${GPU_RUNTIME:-}" \
  -v "$root:/bertship" -w /bertship "$image" bash -c "$inside" bash "$extras" "$@"
