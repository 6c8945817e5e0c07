//! `pointsman policy quarantine`: lists and clears the files that ended a compiler process.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use pointsman_cli::print;
use pointsman_policy_runtime::{QuarantinedFile, clear_quarantine, quarantined_files};

/// Commands for the quarantine of the compile cache.
#[derive(Debug, Subcommand)]
pub enum QuarantineCommand {
    /// List the policy files that ended their compiler process and are not compiled again.
    List(Cache),
    /// Forget quarantined files. A gateway tries them again when its policies are reloaded.
    Clear {
        /// Directory with the quarantine.
        #[command(flatten)]
        cache: Cache,
        /// Digests to forget, as `list` shows them, or their beginning [default: all].
        digests: Vec<String>,
    },
}

/// Directory with the quarantine.
#[derive(Debug, Args)]
pub struct Cache {
    /// Directory of compiled policies: `policies.compile_cache` of the gateway.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
}

impl QuarantineCommand {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        match self {
            Self::List(cache) => {
                let files = cache.files()?;
                let lines: String = files.iter().map(line).collect();
                print(if lines.is_empty() { "no file is quarantined\n" } else { &lines })?;
            }
            Self::Clear { cache, digests } => {
                let files = cache.files()?;
                for digest in digests {
                    let given = hex(digest);
                    if !files.iter().any(|file| hex(&file.digest).starts_with(given)) {
                        bail!("clearing the quarantine: `{digest}` is not quarantined; `list` shows what is");
                    }
                }
                let chosen = |file: &QuarantinedFile| {
                    digests.is_empty()
                        || digests.iter().any(|digest| hex(&file.digest).starts_with(hex(digest)))
                };
                let count = clear_quarantine(&cache.dir, chosen).with_context(|| cache.named())?;
                let noun = if count == 1 { "file" } else { "files" };
                print(&format!("cleared {count} {noun}\n"))?;
                if count > 0 {
                    print("next   pointsman policy reload   # a running gateway tries them again\n")?;
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Cache {
    fn files(&self) -> anyhow::Result<Vec<QuarantinedFile>> {
        if !self.dir.is_dir() {
            bail!("`{}` is not a directory; name that of `policies.compile_cache`", self.dir.display());
        }
        quarantined_files(&self.dir).with_context(|| self.named())
    }

    fn named(&self) -> String {
        format!("the quarantine in `{}` cannot be used", Path::new(&self.dir).display())
    }
}

fn hex(digest: &str) -> &str {
    digest.strip_prefix("sha256:").unwrap_or(digest)
}

fn line(file: &QuarantinedFile) -> String {
    let at = SystemTime::UNIX_EPOCH + Duration::from_millis(file.at_ms);
    let minutes = at.elapsed().unwrap_or_default().as_secs() / 60;
    let ago = match minutes {
        0..60 => format!("{minutes} min ago"),
        60..2880 => format!("{} h ago", minutes / 60),
        _ => format!("{} days ago", minutes / 1440),
    };
    format!("{}  {ago}  release {}  {}\n", file.digest, file.release, file.how)
}
