//! What `[server]` says that has to be read or computed: the operators' token and the number of threads.

use super::{Server, problem::Problem, settings::Listeners};

impl Server {
    /// Returns the token that operators need, from its key or its file.
    ///
    /// # Errors
    /// The problem with it.
    pub(super) fn operators_token(&self) -> Result<Option<String>, Problem> {
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
        if token.as_ref().is_some_and(String::is_empty) {
            let key = if self.admin_token.is_some() { "admin_token" } else { "admin_token_file" };
            return Err(Problem::new(
                format!("server.{key}"),
                "the token is empty: give one, or remove the key to let every operator in",
            ));
        }
        if token.is_none() && self.admin_token_reads {
            return Err(Problem::new(
                "server.admin_token_reads",
                "`true` needs a token: add `admin_token` or `admin_token_file`",
            ));
        }
        Ok(token)
    }
}

fn read_token(file: &std::path::Path) -> Result<String, Problem> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        let message =
            format!("cannot read `{}`: {error}; check the path and its permissions", file.display());
        Problem::new("server.admin_token_file", message)
    })?;
    Ok(text.trim().to_owned())
}

impl Listeners {
    /// Returns the number of threads that serve clients: by default one for every two cores.
    ///
    /// The kernel's part of their work, KV events, the index and compiles use the other cores, and one busy thread
    /// costs less than two that often sleep.
    #[must_use]
    pub fn client_threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2)),
            threads => threads,
        }
    }
}
