//! Addresses that sources of workers give for names. They take the place of a look-up by the system.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
};

use super::{Names, Resolver};

impl Resolver {
    /// Replaces all addresses that sources give. What was known of a name that now has them, or has them no
    /// longer, is forgotten.
    pub fn give(&self, given: HashMap<String, Vec<IpAddr>>) {
        let mut names = self.0.names.lock();
        let Names { known, given: before, .. } = &mut *names;
        let lost = before.keys().filter(|name| !given.contains_key(*name));
        for name in lost.chain(given.keys().filter(|name| !before.contains_key(*name))) {
            if let Some(known) = known.get_mut(name.as_str()) {
                known.forget();
            }
        }
        names.given = given;
    }
}

impl Names {
    /// Returns the addresses that a source gives for a name.
    pub(super) fn given(&self, name: &str) -> Option<Vec<SocketAddr>> {
        let found = self.given.get(name)?;
        Some(found.iter().map(|address| SocketAddr::new(*address, 0)).collect())
    }
}
