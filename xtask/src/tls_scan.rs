//! `tls-scan`: testssl.sh judges the TLS of both listeners. It reports findings with a severity.

use std::{path::Path, process::Command};

use anyhow::Context as _;
use serde::Deserialize;

use crate::{
    certificates::Certificates,
    fleet::{self, Process},
    sh,
    table::Checks,
};

/// Beginnings of findings that do not concern the strength of the listener. They concern the certificate of
/// this run, which no public authority signed, the scanner's own OpenSSL, the rules of browsers for sites,
/// and the resumption of sessions, which testssl.sh cannot always test.
const OF_THE_TEST: [&str; 10] = [
    "cert",
    "engine_problem",
    "HSTS",
    "HPKP",
    "DNS_CAArecord",
    "OCSP_",
    "security_headers",
    "overall_grade",
    "grade_cap",
    "sessionresumption_",
];
/// Finding about the order of ciphers. All ciphers are strong, and a client knows best which of them it
/// computes quickly.
const LEFT_TO_CLIENTS: &str = "cipher_order";
/// Findings of testssl.sh about protocols and ciphers that the listener does not offer.
const NOT_OFFERED: [&str; 4] = ["TLS1", "TLS1_1", "cipherlist_3DES_IDEA", "cipherlist_AVERAGE"];
/// Minimum number of findings. A scan that could not connect has fewer.
const MIN_FINDINGS: u32 = 20;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Also scan a gateway that accepts only TLS 1.3.
    #[arg(long)]
    tls13: bool,
}

/// A finding of testssl.sh.
#[derive(Clone, Debug, Deserialize)]
struct Finding {
    id: String,
    severity: String,
    finding: String,
}

/// Names of the program.
const PROGRAMS: [&str; 2] = ["testssl", "testssl.sh"];
/// How to get the program.
const INSTALL: &str = "testssl.sh is not installed: apt-get install testssl.sh";

/// Returns the reason why the command cannot run on this machine.
pub(crate) fn missing() -> Option<String> {
    (!PROGRAMS.iter().any(|name| sh::is_installed(name))).then(|| INSTALL.to_owned())
}

/// Scans and prints a table. Returns an error when a check fails.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let program = PROGRAMS.into_iter().find(|name| sh::is_installed(name)).context(INSTALL)?;
    let bin = fleet::build("release")?;
    let mut checks = Checks::default();
    for min_version in if args.tls13 { &["1.2", "1.3"][..] } else { &["1.2"] } {
        let dir = tempfile::Builder::new().prefix("pointsman-tls-").tempdir()?;
        let gateway = gateway(&bin, dir.path(), min_version)?;
        let admin = gateway.announced["admin"].as_str().context("the gateway announced no admin port")?;
        for (listener, address) in [("clients", gateway.listening()), ("operators", admin.to_owned())] {
            sh::print(&format!("\n{listener}, TLS {min_version} at least ({address})"));
            judge(&findings(program, &address, dir.path())?, *min_version == "1.3", &mut checks);
        }
    }
    checks.finish()
}

fn gateway(bin: &Path, dir: &Path, min_version: &str) -> anyhow::Result<Process> {
    let tls = format!("{}min_version = {min_version:?}\n", Certificates::write(dir)?.table());
    let file = dir.join("pointsman.toml");
    std::fs::write(&file, format!("[server.tls]\n{tls}[server.admin_tls]\n{tls}"))?;
    let mut command = Command::new(bin.join("pointsman"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
    command.arg("--config").arg(file);
    Process::announcing("gateway", command, dir)
}

fn findings(program: &str, address: &str, dir: &Path) -> anyhow::Result<Vec<Finding>> {
    let file = dir.join(format!("testssl-{}.json", address.replace(':', "-")));
    let mut command = Command::new(program);
    command.args(["--quiet", "--color", "0", "--warnings", "batch", "--ip", "one", "--jsonfile"]);
    command.arg(&file).arg(format!("https://{address}"));
    sh::status(&format!("$ {program} https://{address}"));
    let output = command.output().with_context(|| format!("starting {program}"))?;
    let text = std::fs::read(&file)
        .with_context(|| format!("{program} wrote no report: {}", String::from_utf8_lossy(&output.stdout)))?;
    serde_json::from_slice(&text)
        .with_context(|| format!("the report of {program} is not a list of findings"))
}

/// Prints each finding that concerns the listener.
fn judge(findings: &[Finding], only_tls13: bool, checks: &mut Checks) {
    let mut judged = 0;
    for Finding { id, severity, finding } in findings {
        if id == LEFT_TO_CLIENTS || OF_THE_TEST.iter().any(|start| id.starts_with(start)) {
            continue;
        }
        let passes = match severity.as_str() {
            _ if id == "TLS1_2" => finding.starts_with("offered") != only_tls13,
            _ if id == "TLS1_3" => finding.starts_with("offered"),
            "OK" => true,
            _ if NOT_OFFERED.contains(&id.as_str()) => finding.starts_with("not offered"),
            "LOW" | "MEDIUM" | "HIGH" | "CRITICAL" | "WARN" | "FATAL" => false,
            // Findings of INFO and DEBUG describe the server.
            _ => continue,
        };
        judged += 1;
        checks.check(&format!("testssl {id}"), finding.chars().take(24).collect::<String>(), passes);
    }
    checks.check("testssl findings", judged, judged >= MIN_FINDINGS);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(id: &str, severity: &str) -> Finding {
        Finding { id: id.to_owned(), severity: severity.to_owned(), finding: "x".to_owned() }
    }

    #[test]
    fn a_weakness_and_an_empty_report_fall_short() {
        let verdict = |findings: &[Finding]| {
            let mut checks = Checks::default();
            judge(findings, false, &mut checks);
            checks.finish().is_ok()
        };
        let mut good: Vec<Finding> = (0..20).map(|n| finding(&format!("f{n}"), "OK")).collect();
        good.push(finding("cert_trust", "CRITICAL"));
        assert!(verdict(&good));
        assert!(!verdict(&good[..10]));
        for (id, severity) in [("TLS1", "LOW"), ("TLS1_2", "INFO"), ("TLS1_3", "OK")] {
            let worse = finding(id, severity);
            assert!(!verdict(&good.iter().chain([&worse]).cloned().collect::<Vec<_>>()), "{id}");
        }
    }
}
