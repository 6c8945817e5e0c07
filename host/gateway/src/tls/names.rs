//! The names in a client's certificate, and a list of those that may connect.

use std::sync::Arc;

use pointsman_certificates::x509::{Certificate, GeneralName};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    pki_types::{CertificateDer, UnixTime},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};

use crate::config::NameKind;

/// Names of one kind that are read from a certificate; further ones are ignored.
const MAX_NAMES: usize = 64;

/// Subject alternative names of a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CertificateNames {
    /// DNS names, in lower case.
    pub(crate) dns: Vec<String>,
    /// URIs, for instance SPIFFE ids.
    pub(crate) uris: Vec<String>,
    /// E-mail addresses.
    pub(crate) emails: Vec<String>,
}

impl CertificateNames {
    /// Reads the names of a certificate; `None` when it cannot be parsed.
    pub(crate) fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let mut names = Self::default();
        for name in Certificate::parse(certificate)?.names {
            let (list, name) = match &name {
                GeneralName::DnsName(name) => (&mut names.dns, name.as_str().to_ascii_lowercase()),
                GeneralName::UniformResourceIdentifier(name) => (&mut names.uris, name.to_string()),
                GeneralName::Rfc822Name(name) => (&mut names.emails, name.to_string()),
                _ => continue,
            };
            if list.len() < MAX_NAMES {
                list.push(name);
            }
        }
        Some(names)
    }

    /// Whether the certificate has a configured name.
    pub(crate) fn contains(&self, name: &str) -> bool {
        match NameKind::of(name) {
            NameKind::Uri => self.uris.iter().any(|uri| uri == name),
            NameKind::Email => self.emails.iter().any(|email| email == name),
            NameKind::Dns => self.dns.iter().any(|dns| dns.eq_ignore_ascii_case(name)),
        }
    }
}

/// Accepts the certificates that `authorities` accepts and that have a name of a list.
#[derive(Debug)]
pub(super) struct NamedClients {
    pub(super) authorities: Arc<dyn ClientCertVerifier>,
    pub(super) names: Vec<String>,
}

impl ClientCertVerifier for NamedClients {
    fn client_auth_mandatory(&self) -> bool {
        self.authorities.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.authorities.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.authorities.verify_client_cert(certificate, intermediates, now)?;
        let names = CertificateNames::of(certificate)
            .ok_or(Error::InvalidCertificate(CertificateError::BadEncoding))?;
        if self.names.iter().any(|name| names.contains(name)) {
            return Ok(verified);
        }
        Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authorities.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authorities.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authorities.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_looked_for_among_those_of_its_kind() {
        let names = CertificateNames {
            dns: vec!["a.example".to_owned(), "spiffe://not/a/uri".to_owned()],
            uris: vec!["spiffe://prod/ns/a".to_owned()],
            emails: vec!["bot@example".to_owned()],
        };
        for own in ["a.example", "A.Example", "spiffe://prod/ns/a", "bot@example"] {
            assert!(names.contains(own), "{own}");
        }
        for foreign in ["b.example", "example", "spiffe://not/a/uri", "spiffe://prod/ns/b", "x@example", ""] {
            assert!(!names.contains(foreign), "{foreign}");
        }
    }
}
