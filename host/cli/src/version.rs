//! The version of this build.

/// Release, as in `Cargo.toml`.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// Release, followed by `+` and the commit if the build knew it: `0.1.0+6032306ab12c`. `deploy/package.sh`
/// sets the variable; a build script that asked git would run again after each commit.
pub const VERSION: &str = match option_env!("POINTSMAN_VERSION") {
    Some(version) if !version.is_empty() => version,
    _ => RELEASE,
};

/// Environment variable in which `pointsman` passes its version to a program that it runs.
pub const CALLER_VERSION: &str = "POINTSMAN_CALLER_VERSION";

/// Checks that the `pointsman` that runs this program is of its version. Without one, any version is
/// accepted.
///
/// # Errors
/// It is of another version.
pub fn check_caller() -> anyhow::Result<()> {
    match std::env::var_os(CALLER_VERSION) {
        Some(caller) if caller != VERSION => {
            let caller = caller.display();
            anyhow::bail!(
                "`pointsman` has the version {caller}, and the program with this command {VERSION}: install both from one release"
            )
        }
        _ => Ok(()),
    }
}

/// Returns the commit of this build; `None` if the build did not know it.
#[must_use]
pub fn commit() -> Option<&'static str> {
    VERSION.split_once('+').map(|(_, commit)| commit)
}
