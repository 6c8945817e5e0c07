//! `pointsman key`: makes keys, and prints entries of the configuration with their digests.

use std::{
    io::{IsTerminal as _, Read as _, Write as _},
    process::ExitCode,
};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use clap::{Args, Subcommand, ValueEnum};

use super::print;
use crate::config::KeyDigest;

/// Maximum length of a key on stdin, bytes.
const MAX_KEY: usize = 1024;

#[derive(Debug, Subcommand)]
pub(super) enum KeyCommand {
    /// Make a random key. Prints the entry of the configuration on stdout, and the key, once, on stderr.
    New(KeyArgs),
    /// Read a key from stdin and print its entry of the configuration.
    Hash(KeyArgs),
}

#[derive(Debug, Args)]
pub(super) struct KeyArgs {
    /// Name of the key in logs and limits: letters, digits, `-` and `_`.
    #[arg(long)]
    id: String,
    /// Tenant that the key's requests count for.
    #[arg(long, conflicts_with = "role")]
    tenant: Option<String>,
    /// Make the token of an operator with this role, not a key of clients.
    #[arg(long)]
    role: Option<RoleName>,
    /// Use argon2id, for a key that a person made up. The key has to begin with `ID.`.
    #[arg(long)]
    argon2: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RoleName {
    /// Read.
    Viewer,
    /// Read and change.
    Operator,
}

impl KeyCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::New(args) => {
                args.check()?;
                let secret = BASE64_URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>());
                let key = format!("{}.{secret}", args.id);
                print(&args.entry(&key)?)?;
                writeln!(std::io::stderr(), "the key, which is shown only now: {key}")?;
            }
            Self::Hash(args) => {
                args.check()?;
                print(&args.entry(&key_from_stdin()?)?)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl KeyArgs {
    fn check(&self) -> anyhow::Result<()> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if self.id.is_empty() || self.id.len() > 64 || !self.id.bytes().all(fits) {
            anyhow::bail!("`--id {}` is not an id: expected 1 to 64 letters, digits, `-` and `_`", self.id);
        }
        Ok(())
    }

    /// Returns the entry of the configuration for a key.
    fn entry(&self, key: &str) -> anyhow::Result<String> {
        let digest = if self.argon2 {
            if !key.strip_prefix(&self.id).is_some_and(|rest| rest.starts_with('.')) {
                anyhow::bail!(
                    "the key does not begin with `{}.`: the gateway finds the argon2id digest by this id",
                    self.id
                );
            }
            KeyDigest::argon2id(key)?
        } else {
            KeyDigest::sha256(key)
        };
        let list = if self.role.is_some() { "auth.operators" } else { "auth.keys" };
        let mut entry = format!("[[{list}]]\nid = {}\n", quoted(&self.id));
        if let Some(tenant) = &self.tenant {
            entry.push_str(&format!("tenant = {}\n", quoted(tenant)));
        }
        if let Some(role) = self.role {
            let role = if matches!(role, RoleName::Viewer) { "viewer" } else { "operator" };
            entry.push_str(&format!("role = {}\n", quoted(role)));
        }
        Ok(entry + &format!("digest = {}\n", quoted(&digest.to_string())))
    }
}

/// A string in TOML.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

fn key_from_stdin() -> anyhow::Result<String> {
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        writeln!(std::io::stderr(), "type the key, then Enter and Ctrl-D")?;
    }
    let mut key = String::new();
    stdin.take(MAX_KEY as u64 + 3).read_to_string(&mut key)?;
    let key = key.trim_end_matches(['\r', '\n']);
    if key.is_empty() || key.len() > MAX_KEY {
        anyhow::bail!("the key on stdin has {} bytes: expected 1 to {MAX_KEY}", key.len());
    }
    if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        anyhow::bail!("the key on stdin has blanks, line breaks or other bytes that no header can carry");
    }
    Ok(key.to_owned())
}
