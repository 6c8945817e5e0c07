//! Everything that is wrong with a description, not only the first thing.

use super::{SpecError, WorkerSpec, error, raw::RawSpec};

impl RawSpec {
    /// Returns the problems of all keys, one for each key.
    pub(super) fn problems(&self) -> Vec<SpecError> {
        let (mut rest, mut found) = (self.clone(), Vec::<SpecError>::new());
        // Each round gives the key at fault a valid value, and finds the next problem.
        while let Err(error) = rest.clone().resolve() {
            if found.iter().any(|known| known.key == error.key) {
                break;
            }
            let replaced = rest.replace_by_valid(&error.key);
            found.push(error);
            if !replaced {
                break;
            }
        }
        found
    }

    /// Gives a key a value that is valid whatever the other keys say. Returns `false` for an unknown key.
    fn replace_by_valid(&mut self, key: &str) -> bool {
        match key {
            "url" => self.url = Some("https://valid".to_owned()),
            "engine" => self.engine = Some("vllm".to_owned()),
            "role" => self.role = Some("aggregated".to_owned()),
            "tls_server_name" => self.tls_server_name = None,
            "api_key" => self.api_key = None,
            "dp_size" => self.dp_size = None,
            "handoff_lease_s" => self.handoff_lease_s = None,
            "block_size" => self.block_size = None,
            "max_concurrency" => self.max_concurrency = None,
            "kv_transfer" => self.kv_transfer = None,
            "kv_addr" => (self.kv_addr, self.transport) = (None, None),
            "bootstrap_port" => self.transport = None,
            "bootstrap_host" => self.bootstrap_host = None,
            "kv_events" => self.kv_events = None,
            "kv_replay" => self.kv_replay = None,
            _ => return false,
        }
        true
    }
}

impl WorkerSpec {
    /// Returns what is wrong with keys and values that complete the descriptions of a source. Each worker has
    /// its own URL with this scheme, and may have its own values of the keys `of_source`.
    #[must_use]
    pub fn problems_of_defaults<'a>(
        pairs: impl IntoIterator<Item = (&'a str, &'a str)>,
        scheme: &str,
        of_source: &[&str],
    ) -> Vec<SpecError> {
        let mut raw = RawSpec::default();
        let mut found: Vec<SpecError> =
            pairs.into_iter().filter_map(|(key, value)| raw.set(key, value).err()).collect();
        raw.url = Some(format!("{scheme}://host:8000"));
        let is_new = |error: &SpecError| {
            !of_source.contains(&&*error.key) && !found.iter().any(|known| known.key == error.key)
        };
        let others: Vec<SpecError> = raw.problems().into_iter().filter(is_new).collect();
        found.extend(others);
        found
    }

    /// Returns everything that is wrong with the value of a `--worker` flag that [`WorkerSpec::parse_flag`]
    /// refuses.
    #[must_use]
    pub fn flag_problems(flag: &str) -> Vec<SpecError> {
        let (mut raw, mut found) = (RawSpec::default(), Vec::<SpecError>::new());
        for pair in flag.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let set = match pair.split_once('=') {
                Some((key, value)) => raw.set(key, value),
                // It may be the rest of a secret.
                None if flag.contains("api_key=") || flag.contains('@') => {
                    let problem =
                        "separates keys: write a worker whose values have commas into the configuration file";
                    Err(error("a comma", problem.to_owned()))
                }
                None => Err(error(pair, "is not of the form key=value".to_owned())),
            };
            found.extend(set.err());
        }
        // A key that could not be read is not missing.
        let is_new = |error: &SpecError| !found.iter().any(|known| known.key == error.key);
        let others: Vec<SpecError> = raw.problems().into_iter().filter(is_new).collect();
        found.extend(others);
        found
    }
}
