//! Keys: those that clients have to send, and those that engines get.

use anyhow::bail;
use sha2::{Digest as _, Sha256};

use super::{Flavor, Import, arguments::Given};
use crate::report::{Kind, Place};

impl<'a> Import<'a> {
    /// Keys of clients. sglang-router asks them for the key that it sends to engines. Without such a key, the
    /// routers pass on what clients send, and the engines check it.
    pub(super) fn keys(&mut self) -> anyhow::Result<()> {
        if let Some(given) = self.key().filter(|given| !is_printable(given.value().trim_end())) {
            bail!(
                "{}: the key has characters other than printable ASCII, and engines refuse such a key: use another one",
                given.at()
            );
        }
        let is_of_clients = self.flavor == Flavor::Sglang;
        match self.line.last("api-key") {
            Some(given) if self.key().is_none() => {
                let ours = "left out: the value is empty, as of a variable that is not set: give the key itself. \
                            Without it, clients need no key: see [[auth.keys]]";
                self.note_translation(given, Kind::Missing, ours);
                self.forward_authorization();
            }
            Some(given) if is_of_clients => {
                let section = self.draft.element("auth.keys", format!("{}: clients send it", given.flag()));
                section.set("id", "router", "").set("digest", digest(given.value()), "");
            }
            None if !self.line.has("api-key") => self.forward_authorization(),
            None if is_of_clients => {
                let ours = "left out: the value is a variable of a shell or a template: give the value itself. \
                            Without it, clients need no key: see [[auth.keys]]";
                for given in self.line.given.iter().filter(|given| given.name == "api-key") {
                    self.note_translation(given, Kind::Missing, ours);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Returns the key that engines get. An empty value is not a key.
    pub(super) fn key(&self) -> Option<&'a Given> {
        self.line.last("api-key").filter(|given| !given.value().trim().is_empty())
    }

    fn forward_authorization(&mut self) {
        let comment = format!(
            "as {} does; where engines ask for a key, set api_key of the workers and [[auth.keys]] of the clients",
            self.flavor.name()
        );
        self.draft.set("upstream", "forward_authorization", true, comment);
        let ours = "upstream.forward_authorization: engines get it, but health checks have none: where engines \
                    ask for a key, set api_key of the workers, which takes its place, and [[auth.keys]] of the clients";
        self.report.add(Kind::Approximated, Place::Default, "the clients' header `authorization`", ours);
    }
}

/// Returns whether engines read a key as the router sends it. They take other bytes of a header for Latin-1.
fn is_printable(key: &str) -> bool {
    key.bytes().all(|byte| (b' '..=b'~').contains(&byte))
}

/// Returns the digest of a key, as `pointsman key hash` prints it.
pub(super) fn digest(key: &str) -> String {
    format!("sha256:{:x}", Sha256::digest(key.as_bytes()))
}
