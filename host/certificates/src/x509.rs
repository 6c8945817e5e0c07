//! When a certificate is valid, and its alternative names.
//!
//! Whether it is trusted is left to `webpki`, which tells neither its times nor all kinds of names
//! (decision 53).

pub use x509_cert::ext::pkix::name::GeneralName;
use x509_cert::{
    certificate::{CertificateInner, Raw},
    der::{DateTime, Decode as _},
    ext::pkix::{BasicConstraints, SubjectAltName},
};

/// A parsed certificate.
#[derive(Debug)]
pub struct Certificate {
    /// When it begins to be valid.
    pub not_before: DateTime,
    /// When it expires.
    pub not_after: DateTime,
    /// Subject alternative names.
    pub names: Vec<GeneralName>,
    /// Whether it is that of an authority (`CA:TRUE`), which clients of rustls refuse as that of a server.
    pub is_authority: bool,
}

impl Certificate {
    /// Parses a certificate; `None` when it is malformed.
    pub fn parse(der: &[u8]) -> Option<Self> {
        // `Raw`: some authorities issue longer serial numbers than RFC 5280 allows, and TLS accepts them.
        let signed = CertificateInner::<Raw>::from_der(der).ok()?.tbs_certificate;
        let mut names = Vec::new();
        for extension in signed.filter::<SubjectAltName>() {
            let (_critical, SubjectAltName(more)) = extension.ok()?;
            names.extend(more);
        }
        let mut constraints = signed.filter::<BasicConstraints>().filter_map(Result::ok);
        let is_authority = constraints.any(|(_critical, constraints)| constraints.ca);
        let validity = signed.validity;
        let (not_before, not_after) = (validity.not_before.to_date_time(), validity.not_after.to_date_time());
        Some(Self { not_before, not_after, names, is_authority })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::{CertificateParams, KeyPair, SanType, SerialNumber, date_time_ymd};
    use x509_cert::der::asn1::{Ia5String, OctetString};

    use super::*;

    fn issued() -> Vec<u8> {
        let names = ["a.example", "10.0.0.1"].map(str::to_owned);
        let mut params = CertificateParams::new(names).unwrap();
        params.subject_alt_names.push(SanType::URI("spiffe://prod/a".try_into().unwrap()));
        params.subject_alt_names.push(SanType::Rfc822Name("a@example".try_into().unwrap()));
        (params.not_before, params.not_after) = (date_time_ymd(2024, 2, 29), date_time_ymd(2051, 12, 31));
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    #[test]
    fn times_and_names_are_those_that_the_certificate_was_issued_with() {
        let der = issued();
        let certificate = Certificate::parse(&der).unwrap();
        let (before, after) = (certificate.not_before, certificate.not_after);
        let seconds = |time: DateTime| time.unix_duration().as_secs();
        assert_eq!((seconds(before), seconds(after)), (1_709_164_800, 2_587_593_600));
        let text = |name: &str| Ia5String::new(name).unwrap();
        let expected = [
            GeneralName::DnsName(text("a.example")),
            GeneralName::IpAddress(OctetString::new([10, 0, 0, 1]).unwrap()),
            GeneralName::UniformResourceIdentifier(text("spiffe://prod/a")),
            GeneralName::Rfc822Name(text("a@example")),
        ];
        assert_eq!((certificate.names, certificate.is_authority), (expected.into(), false));
    }

    #[test]
    fn serial_numbers_may_be_longer_than_the_standard_allows() {
        let mut params = CertificateParams::new(["a.example".to_owned()]).unwrap();
        params.serial_number = Some(SerialNumber::from_slice(&[0x7F; 32]));
        let issued = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        assert_eq!(Certificate::parse(issued.der()).unwrap().names.len(), 1);
    }

    #[test]
    fn the_certificate_of_an_authority_says_so() {
        let mut params = CertificateParams::new(["a.example".to_owned()]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let issued = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        assert!(Certificate::parse(issued.der()).unwrap().is_authority);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_fail_in_another_way(
            at in 0_usize..600,
            byte in any::<u8>(),
            end in 0_usize..600,
            noise in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            let mut der = issued();
            if let Some(place) = der.get_mut(at) {
                *place = byte;
            }
            der.truncate(end.max(1));
            let _ = Certificate::parse(&der).map(|certificate| certificate.not_after.unix_duration());
            let _ = Certificate::parse(&noise);
        }
    }
}
