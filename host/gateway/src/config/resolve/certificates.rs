//! Validates `[[auth.certificates]]`.

use std::collections::BTreeMap;

use super::{Problems, auth::MAX_TENANT};
use crate::config::{CertificateEntry, NameKind, Server, settings::CertificateSettings};

/// Limit of the entries.
const MAX_CERTIFICATES: usize = 10_000;
/// Limit of a name, bytes. A DNS name has 253, a SPIFFE id 2,048.
const MAX_NAME: usize = 2_048;

impl Problems {
    pub(super) fn certificates(
        &mut self,
        entries: &[CertificateEntry],
        server: &Server,
    ) -> Vec<CertificateSettings> {
        if entries.len() > MAX_CERTIFICATES {
            let message = format!("{} entries are more than the limit of {MAX_CERTIFICATES}", entries.len());
            self.add("auth.certificates", message);
            return Vec::new();
        }
        let mut seen = BTreeMap::new();
        let mut valid = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            let path = format!("auth.certificates[{index}]");
            let Some(settings) = self.certificate(&path, entry, server) else { continue };
            if let Some(other) = seen.insert((settings.role.is_some(), settings.name.clone()), path.clone()) {
                let message = format!("`{}` is already the name of {other}: remove one of them", entry.name);
                self.add(format!("{path}.name"), message);
            }
            valid.push(settings);
        }
        valid
    }

    fn certificate(
        &mut self,
        path: &str,
        entry: &CertificateEntry,
        server: &Server,
    ) -> Option<CertificateSettings> {
        let CertificateEntry { name, tenant, role } = entry;
        if name.is_empty() || name.len() > MAX_NAME || name.contains(char::is_whitespace) {
            let message = format!(
                "`{name}` is not a name: expected a DNS name, a URI such as spiffe://…, or an e-mail address, at most \
                 {MAX_NAME} bytes"
            );
            self.add(format!("{path}.name"), message);
            return None;
        }
        if tenant.len() > MAX_TENANT {
            let message = format!("{} bytes are more than the limit of {MAX_TENANT}", tenant.len());
            self.add(format!("{path}.tenant"), message);
            return None;
        }
        if role.is_some() && !tenant.is_empty() {
            let message = "an operator has no tenant: give the client an entry of its own, without `role`";
            self.add(format!("{path}.tenant"), message);
        }
        let (listener, tls) = match role {
            Some(_) => ("server.admin_tls", &server.admin_tls),
            None => ("server.tls", &server.tls),
        };
        if tls.as_ref().is_none_or(|tls| tls.client_ca_file.is_none()) {
            let message =
                format!("no certificate is asked for: name the authorities in `{listener}.client_ca_file`");
            self.add(format!("{path}.name"), message);
        }
        let name = match NameKind::of(name) {
            NameKind::Dns => name.to_ascii_lowercase(),
            NameKind::Uri | NameKind::Email => name.clone(),
        };
        let tenant = Some(tenant.clone()).filter(|tenant| !tenant.is_empty());
        Some(CertificateSettings { name, tenant, role: *role })
    }
}
