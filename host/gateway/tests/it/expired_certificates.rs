//! Certificates that expired, with the real binary.

#![allow(clippy::unwrap_used, reason = "tests and their helpers may fail")]

use std::{
    fs,
    io::{BufRead as _, BufReader},
    process::Stdio,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rcgen::{CertificateParams, KeyPair, date_time_ymd};
use rustix::process::Signal;

use crate::process::{POINTSMAN, Process, command, run};

const CONFIG: &str = "\
[server]
listen = '127.0.0.1:0'
admin_listen = '127.0.0.1:0'
[server.tls]
cert_file = 'clients.pem'
key_file = 'clients.key'
[server.admin_tls]
cert_file = 'operators.pem'
key_file = 'operators.key'
";

/// Time in which the gateway starts.
const LIFETIME: Duration = Duration::from_secs(8);
/// Some intervals of two seconds in which files are read.
const READINGS: Duration = Duration::from_secs(6);

#[test]
fn j3_the_start_goes_on_with_an_expired_certificate_and_logs_each_once() {
    let dir = tempfile::tempdir().unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    for (name, lifetime) in [("clients", now + LIFETIME), ("operators", Duration::from_secs(1))] {
        let mut params = CertificateParams::new(["a.example".to_owned()]).unwrap();
        params.not_before = date_time_ymd(1970, 1, 1);
        params.not_after = date_time_ymd(1970, 1, 1) + lifetime;
        let key = KeyPair::generate().unwrap();
        fs::write(dir.path().join(format!("{name}.pem")), params.self_signed(&key).unwrap().pem()).unwrap();
        fs::write(dir.path().join(format!("{name}.key")), key.serialize_pem()).unwrap();
    }
    fs::write(dir.path().join("p.toml"), CONFIG).unwrap();
    let (code, _, found) = run(command(POINTSMAN, &["check-config", "p.toml"]).current_dir(dir.path()), "");
    // J3.5
    assert!(code != Some(0), "{found}");
    assert!(
        found.contains("server.admin_tls.cert_file: the certificate in `operators.pem` expired"),
        "{found}"
    );
    let mut serve = command(POINTSMAN, &["--log-json", "serve", "--config", "p.toml"]);
    serve.current_dir(dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut gateway = Process::start(&mut serve);
    // It starts all the same (J3.5).
    gateway.addresses();
    let log = BufReader::new(gateway.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut expiries = log.filter(|line| line.contains("certificate expired"));
    let lines = expiries.next().unwrap() + &expiries.next().unwrap();
    for table in ["server.admin_tls", "server.tls"] {
        // J3.6: at the start, and while it serves
        assert!(lines.contains(&format!("{table}.cert_file: ")), "{lines}");
    }
    std::thread::sleep(READINGS);
    gateway.signal(Signal::TERM);
    // J3.6
    assert_eq!(expiries.next(), None);
    assert!(gateway.wait().unwrap().success());
}
