//! Values of `[server]` that are read from files or computed: the operators' token and the number of threads.

use super::{KeyDigest, Problem, Secret, Server, settings::Listeners};

impl Server {
    /// Returns the token that operators need, from its key or its file. `others`: operators have other ways
    /// to prove who they are.
    ///
    /// # Errors
    /// The problem with it.
    pub(super) fn operators_token(&self, others: bool) -> Result<Option<Secret>, Problem> {
        let token = match (&self.admin_token, &self.admin_token_file) {
            (Some(_), Some(_)) => {
                return Err(Problem::new(
                    "server.admin_token_file",
                    "`admin_token` is given, too: remove one of them",
                ));
            }
            (Some(token), None) => Some(token.clone()),
            (None, Some(file)) => Some(read_token(file)?),
            (None, None) => None,
        };
        if token.as_ref().is_some_and(|token| token.expose().is_empty()) {
            let key = if self.admin_token.is_some() { "admin_token" } else { "admin_token_file" };
            return Err(Problem::new(
                format!("server.{key}"),
                "the token is empty: give one, or remove the key to let every operator in",
            ));
        }
        if let Some(message) = token.as_ref().and_then(|token| KeyDigest::sha256(token.expose()).published())
        {
            let key = if self.admin_token.is_some() { "admin_token" } else { "admin_token_file" };
            return Err(Problem::new(format!("server.{key}"), message));
        }
        if token.is_none() && !others && self.admin_token_reads {
            return Err(Problem::new(
                "server.admin_token_reads",
                "`true` needs a token: add `admin_token` or `admin_token_file`",
            ));
        }
        if token.is_none() && !others && !self.admin_listen.ip().is_loopback() && !self.admin_insecure {
            return Err(Problem::new(
                "server.admin_listen",
                format!(
                    "`{}` can be reached from the network, and there is no admin token: add `admin_token_file`, listen \
                     on 127.0.0.1, or set `admin_insecure = true` to let everyone change this gateway",
                    self.admin_listen
                ),
            ));
        }
        Ok(token)
    }

    /// Returns what is wrong with the operators' names.
    pub(super) fn bad_names(&self) -> Option<Problem> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
        let bad = |name: &String| name.is_empty() || !name.bytes().all(fits);
        let (index, name) = self.admin_names.iter().enumerate().find(|(_, name)| bad(name))?;
        let message =
            format!("`{name}` is not a host name: expected letters, digits, `-` and `.`, without a port");
        Some(Problem::new(format!("server.admin_names[{index}]"), message))
    }
}

fn read_token(file: &std::path::Path) -> Result<Secret, Problem> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        let message =
            format!("cannot read `{}`: {error}; check the path and its permissions", file.display());
        Problem::new("server.admin_token_file", message)
    })?;
    Ok(text.trim().into())
}

impl Listeners {
    /// Returns the number of threads that serve clients: by default one for every two cores.
    ///
    /// The kernel's part of their work, KV events, the index and compiles use the other cores, and one busy
    /// thread costs less than two that often sleep.
    #[must_use]
    pub fn client_threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2)),
            threads => threads,
        }
    }

    /// Returns the number of threads that encode long prompts: by default one for every two cores, and at
    /// least two, so that one very long prompt leaves a thread to the others.
    #[must_use]
    pub fn encode_threads(&self) -> usize {
        match self.tokenizer_threads {
            0 => std::thread::available_parallelism().map_or(2, |cores| cores.get().div_ceil(2).max(2)),
            threads => threads,
        }
    }
}
