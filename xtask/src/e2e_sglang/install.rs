//! Installs SGLang 0.5.23 on a machine without a GPU.
//!
//! SGLang's kernels exist only as a wheel for GPUs, so a small module of this repository replaces them. One
//! branch of the prefill engine that needs CUDA is left out.

use crate::{real_engines::Venv, sh};

const SGLANG: &str = "sglang==0.5.23";
/// Packages that SGLang imports on CPU. SGLang's own list contains packages that need CUDA.
const REQUIREMENTS: &str = include_str!("requirements.txt");
const KERNELS: &str = include_str!("sgl_kernel.py");

/// Installs what a virtual environment lacks.
pub(crate) fn ensure(venv: &Venv) -> anyhow::Result<()> {
    if !venv.has("sglang torch transformers mooncake tokenizers") {
        sh::status("installing SGLang (about 7 GB)");
        venv.create()?;
        venv.install(&["--no-deps", SGLANG])?;
        venv.install_list(REQUIREMENTS)?;
    }
    let kernels = venv.packages()?.join("sgl_kernel");
    std::fs::create_dir_all(&kernels)?;
    std::fs::write(kernels.join("__init__.py"), KERNELS)?;
    venv.patch(
        "sglang/srt/disaggregation/prefill.py",
        "if getattr(sender, \"supports_host_tensor_indices\", False) and not (",
        "if torch.cuda.is_available() and getattr(sender, \"supports_host_tensor_indices\", False) and not (",
    )?;
    let mooncake = sh::succeeds(venv.python().args(["-c", "import mooncake.engine"]));
    anyhow::ensure!(mooncake, "Mooncake cannot be loaded: install the packages libibverbs1 and librdmacm1");
    Ok(())
}
