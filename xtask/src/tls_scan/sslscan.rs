//! sslscan: lists the protocols and ciphers that a listener accepts.

use std::process::Command;

use anyhow::Context as _;

use crate::{sh, table::Checks};

/// Protocols that no listener may accept.
const OLD: [&str; 4] = ["SSLv2", "SSLv3", "TLSv1.0", "TLSv1.1"];
/// Minimum number of bits of a cipher.
const MIN_BITS: u32 = 128;

/// Runs sslscan and returns its report.
pub(super) fn scan(address: &str) -> anyhow::Result<String> {
    sh::status(&format!("$ sslscan {address}"));
    let output = Command::new("sslscan").args(["--no-colour", address]).output();
    let output = output.context("starting sslscan")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Judges a report.
pub(super) fn judge(report: &str, only_tls13: bool, checks: &mut Checks) {
    let protocol = |name: &str| {
        let line = report.lines().find(|line| line.split_whitespace().next() == Some(name))?;
        line.split_whitespace().nth(1).map(str::to_owned)
    };
    for name in OLD {
        let state = protocol(name).unwrap_or_else(|| "not reported".to_owned());
        checks.check(&format!("sslscan {name}"), &state, state == "disabled");
    }
    for (name, wanted) in [("TLSv1.2", !only_tls13), ("TLSv1.3", true)] {
        let state = protocol(name).unwrap_or_else(|| "not reported".to_owned());
        let passes = state == if wanted { "enabled" } else { "disabled" };
        checks.check(&format!("sslscan {name}"), &state, passes);
    }
    let ciphers: Vec<(u32, &str)> = report.lines().filter_map(cipher).collect();
    let weakest =
        ciphers.iter().min().map_or("none".to_owned(), |(bits, name)| format!("{name} ({bits} bits)"));
    let is_strong =
        |(bits, name): &(u32, &str)| *bits >= MIN_BITS && !name.contains("CBC") && !name.contains("RC4");
    checks.check("sslscan weakest cipher", weakest, !ciphers.is_empty() && ciphers.iter().all(is_strong));
    for (what, good) in [
        ("Secure session renegotiation supported", "renegotiation is secure"),
        ("Session renegotiation not supported", "there is no renegotiation"),
    ] {
        if report.contains(what) {
            checks.show("sslscan renegotiation", good);
        }
    }
    let renegotiates = report.contains("Insecure session renegotiation supported");
    checks.check("sslscan insecure renegotiation", renegotiates, !renegotiates);
    let compresses = report.contains("Compression enabled");
    checks.check("sslscan compression", compresses, !compresses);
    let bleeds = report
        .lines()
        .any(|line| line.contains("vulnerable to heartbleed") && !line.contains("not vulnerable"));
    checks.check("sslscan heartbleed", bleeds, !bleeds);
}

/// Returns the bits and the name of the cipher in a line such as `Accepted  TLSv1.2  256 bits
/// ECDHE-ECDSA-AES256-GCM-SHA384`.
fn cipher(line: &str) -> Option<(u32, &str)> {
    let mut words = line.split_whitespace();
    words.next().filter(|first| ["Preferred", "Accepted"].contains(first))?;
    let mut words = words.skip(1);
    let bits = words.next()?.parse().ok()?;
    let name = words.nth(1)?;
    Some((bits, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "  SSL/TLS Protocols:\nSSLv2     disabled\nSSLv3     disabled\nTLSv1.0   disabled\n\
        TLSv1.1   disabled\nTLSv1.2   enabled\nTLSv1.3   enabled\n\n  TLS Compression:\nCompression disabled\n\
        TLSv1.2 not vulnerable to heartbleed\n\
        Preferred TLSv1.3  256 bits  TLS_AES_256_GCM_SHA384        Curve 25519 DHE 253\n\
        Accepted  TLSv1.2  128 bits  ECDHE-ECDSA-AES128-GCM-SHA256 Curve 25519 DHE 253\n";

    fn passes(report: &str, only_tls13: bool) -> bool {
        let mut checks = Checks::default();
        judge(report, only_tls13, &mut checks);
        checks.finish().is_ok()
    }

    #[test]
    fn old_protocols_and_weak_ciphers_fall_short() {
        assert!(passes(REPORT, false) && !passes(REPORT, true));
        assert!(!passes(&REPORT.replace("TLSv1.0   disabled", "TLSv1.0   enabled"), false));
        assert!(!passes(&REPORT.replace("128 bits", "112 bits"), false));
        assert!(!passes(&REPORT.replace("not vulnerable", "vulnerable"), false));
        assert!(!passes("", false));
    }
}
