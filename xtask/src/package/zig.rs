//! A linker for an older glibc than this machine's. zig contains the symbols of each glibc.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use super::glibc::Glibc;
use crate::sh;

/// zig from PyPI. Another version writes other bytes.
const PACKAGE: &str = "ziglang==0.17.1";

/// Installs zig into a virtual environment in the target directory. Returns a program that links for this
/// glibc.
pub(super) fn linker(target: &Path, glibc: Glibc) -> anyhow::Result<PathBuf> {
    let venv = target.join("venv-zig");
    let python = venv.join("bin/python");
    let version = PACKAGE.rsplit('=').next().unwrap_or_default();
    let check = format!("import importlib.metadata as m; assert m.version('ziglang') == '{version}'");
    if !sh::succeeds(Command::new(&python).args(["-c", &check])) {
        sh::run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
        let mut pip = Command::new(venv.join("bin/pip"));
        sh::run(pip.args(["install", "--quiet", "--only-binary", ":all:", PACKAGE]))?;
    }
    let linker = target.join(format!("zig-glibc-{glibc}"));
    fs::write(&linker, script(&python, glibc))?;
    fs::set_permissions(&linker, fs::Permissions::from_mode(0o755))?;
    Ok(linker)
}

/// zig needs the target instead of `-m64`.
fn script(python: &Path, glibc: Glibc) -> String {
    let (python, arch) = (python.display(), std::env::consts::ARCH);
    format!(
        "#!/bin/sh\nfor argument; do\n  shift\n  [ \"$argument\" = -m64 ] || set -- \"$@\" \"$argument\"\ndone\n\
         exec '{python}' -m ziglang cc -target {arch}-linux-gnu.{glibc} \"$@\"\n"
    )
}

#[cfg(test)]
mod tests {
    use std::{path::Path, process::Command};

    use super::script;

    #[test]
    fn the_script_passes_arguments_on_in_their_order() {
        let script = script(Path::new("/bin/echo"), "2.28".parse().unwrap());
        let script = script.replace("exec '/bin/echo' -m", "printf '%s|'");
        let output = Command::new("sh").args(["-c", &script, "sh", "-m64", "a b", "-lc"]).output().unwrap();
        let target = format!("{}-linux-gnu.2.28", std::env::consts::ARCH);
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("ziglang|cc|-target|{target}|a b|-lc|"));
    }
}
