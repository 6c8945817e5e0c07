//! Remembers which objects had a role of llm-d.
//!
//! llm-d removes the label to take a pod out of its role before the pod gets another one. Without the memory,
//! the default of the source would give such a pod a role at once.

use std::collections::{HashMap, HashSet};

use super::super::{llm_d_role::ROLE_LABEL, table::Invalid};
use super::objects::Meta;

/// Uids of the objects that had the label, by name.
#[derive(Debug, Default)]
pub(super) struct RoleLabels(HashMap<String, String>);

impl RoleLabels {
    /// Notes whether the object has the label.
    ///
    /// # Errors
    /// It had the label, and nothing gives its role now.
    pub(super) fn check(&mut self, meta: &Meta) -> Result<(), Invalid> {
        if meta.llm_d_role().is_some() {
            self.0.insert(meta.name.clone(), meta.uid.clone());
            return Ok(());
        }
        match self.0.get(&meta.name) {
            Some(uid) if *uid != meta.uid => self.forget(&meta.name),
            Some(_) if !meta.has_own_role() => {
                let problem = format!(
                    "label {ROLE_LABEL} was removed: it gets no requests until it has the label again, or \
                     pointsman.dev/role"
                );
                return Err(Invalid { problem, has_none: true, ..Invalid::default() });
            }
            _ => {}
        }
        Ok(())
    }

    /// Forgets an object that was deleted.
    pub(super) fn forget(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// Forgets all objects but these.
    pub(super) fn keep<'a>(&mut self, names: impl Iterator<Item = &'a str>) {
        let names: HashSet<&str> = names.collect();
        self.0.retain(|name, _| names.contains(name.as_str()));
    }
}
