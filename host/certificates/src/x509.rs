//! Reads the validity and the names of a certificate (RFC 5280, section 4.1) from its DER, and skips the
//! rest.
//!
//! Whether a certificate is trusted is left to `webpki`. Decision 38 says why no library for all of X.509 is
//! used.

const INTEGER: u8 = 0x02;
const OCTET_STRING: u8 = 0x04;
const OBJECT_IDENTIFIER: u8 = 0x06;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const SEQUENCE: u8 = 0x30;
/// Context-specific tags of a certificate: its version, and its extensions.
const VERSION: u8 = 0xA0;
const EXTENSIONS: u8 = 0xA3;
/// `id-ce-subjectAltName`, 2.5.29.17.
const SUBJECT_ALT_NAME: [u8; 3] = [0x55, 0x1D, 0x11];

/// Kind of a name, by its tag: an email address.
pub const EMAIL: u8 = 0x81;
/// Kind of a name: a host.
pub const DNS: u8 = 0x82;
/// Kind of a name: a URI.
pub const URI: u8 = 0x86;
/// Kind of a name: an address.
pub const IP: u8 = 0x87;

/// A parsed certificate.
#[derive(Debug)]
pub struct Certificate<'a> {
    /// When it begins to be valid.
    pub not_before: Time,
    /// When it expires.
    pub not_after: Time,
    /// Subject alternative names: kind and bytes.
    pub names: Vec<(u8, &'a [u8])>,
}

/// A point in time, in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time {
    year: i64,
    /// Month, day, hour, minute, second.
    rest: [u8; 5],
}

impl<'a> Certificate<'a> {
    /// Parses a certificate; `None` when it is malformed.
    pub fn parse(der: &'a [u8]) -> Option<Self> {
        let mut certificate = Reader(der).enter(SEQUENCE)?;
        let mut signed = certificate.enter(SEQUENCE)?;
        if signed.peek() == Some(VERSION) {
            signed.next()?;
        }
        signed.read_element(INTEGER)?;
        signed.read_element(SEQUENCE)?; // signature algorithm
        signed.read_element(SEQUENCE)?; // issuer
        let mut validity = signed.enter(SEQUENCE)?;
        let (not_before, not_after) = (validity.time()?, validity.time()?);
        let mut names = Vec::new();
        while let Some((tag, content)) = signed.next() {
            if tag == EXTENSIONS {
                let mut extensions = Reader(content).enter(SEQUENCE)?;
                while let Some((_, extension)) = extensions.next() {
                    names.extend(alternative_names(extension)?);
                }
            }
        }
        Some(Self { not_before, not_after, names })
    }
}

/// The names of an extension; empty when it is another one.
fn alternative_names(extension: &[u8]) -> Option<Vec<(u8, &[u8])>> {
    let mut extension = Reader(extension);
    if extension.read_element(OBJECT_IDENTIFIER)? != SUBJECT_ALT_NAME {
        return Some(Vec::new());
    }
    let (mut tag, mut content) = extension.next()?;
    if tag != OCTET_STRING {
        // Whether it is critical.
        (tag, content) = extension.next()?;
    }
    if tag != OCTET_STRING {
        return None;
    }
    let (mut list, mut names) = (Reader(content).enter(SEQUENCE)?, Vec::new());
    while let Some(name) = list.next() {
        names.push(name);
    }
    Some(names)
}

/// Bytes of DER that are still to be read.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<u8> {
        self.0.first().copied()
    }

    /// Reads one element: its tag and its content. `None` at the end, and when the element is malformed.
    fn next(&mut self) -> Option<(u8, &'a [u8])> {
        let (&[tag, first], mut rest) = self.0.split_first_chunk::<2>()?;
        let mut length = usize::from(first);
        if first >= 0x80 {
            let (bytes, after) = rest.split_at_checked(usize::from(first & 0x7F))?;
            if bytes.is_empty() || bytes.len() > 4 {
                return None;
            }
            length = bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
            rest = after;
        }
        let (content, after) = rest.split_at_checked(length)?;
        self.0 = after;
        Some((tag, content))
    }

    /// Reads an element of one kind.
    fn read_element(&mut self, wanted: u8) -> Option<&'a [u8]> {
        self.next().filter(|(tag, _)| *tag == wanted).map(|(_, content)| content)
    }

    fn enter(&mut self, wanted: u8) -> Option<Self> {
        self.read_element(wanted).map(Self)
    }

    fn time(&mut self) -> Option<Time> {
        let (tag, text) = self.next()?;
        let (year, rest) = match tag {
            UTC_TIME => {
                let (year, rest) = text.split_at_checked(2)?;
                let year = number(year)?;
                (if year < 50 { 2000 + year } else { 1900 + year }, rest)
            }
            GENERALIZED_TIME => {
                let (year, rest) = text.split_at_checked(4)?;
                (number(year)?, rest)
            }
            _ => return None,
        };
        let digits = rest.strip_suffix(b"Z").filter(|digits| digits.len() == 10)?;
        let mut parts = [0; 5];
        for (part, digits) in parts.iter_mut().zip(digits.chunks(2)) {
            *part = u8::try_from(number(digits)?).ok()?;
        }
        Some(Time { year, rest: parts })
    }
}

fn number(digits: &[u8]) -> Option<i64> {
    if !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

impl Time {
    /// Returns the seconds since 1970.
    pub fn seconds(self) -> i64 {
        let [month, day, hour, minute, second] = self.rest.map(i64::from);
        // Days of the proleptic Gregorian calendar, with years that begin in March.
        let year = if month <= 2 { self.year - 1 } else { self.year };
        let era = year.div_euclid(400);
        let of_era = year - era * 400;
        let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
        let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
        ((days * 24 + hour) * 60 + minute) * 60 + second
    }
}

impl std::fmt::Display for Time {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [month, day, hour, minute, second] = self.rest;
        write!(f, "{:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC", self.year)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::{CertificateParams, KeyPair, SanType, date_time_ymd};

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
        assert_eq!((before.seconds(), after.seconds()), (1_709_164_800, 2_587_593_600));
        assert_eq!(before.to_string(), "2024-02-29 00:00:00 UTC");
        let expected: [(u8, &[u8]); 4] =
            [(DNS, b"a.example"), (IP, &[10, 0, 0, 1]), (URI, b"spiffe://prod/a"), (EMAIL, b"a@example")];
        assert_eq!(certificate.names, expected);
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
            let _ = Certificate::parse(&der).map(|certificate| certificate.not_after.seconds());
            let _ = Certificate::parse(&noise);
        }
    }
}
