//! Certificates that expired, with the real binary.

#![allow(clippy::unwrap_used, reason = "tests and their helpers may fail")]

use std::{
    fs,
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rcgen::{CertificateParams, KeyPair, date_time_ymd};
use rustix::process::{Pid, Signal, kill_process};

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
    let command = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.current_dir(dir.path()).env_remove("RUST_LOG");
        command
    };
    let checked = command().args(["check-config", "p.toml"]).output().unwrap();
    let found = String::from_utf8_lossy(&checked.stderr).into_owned();
    // J3.5
    assert!(!checked.status.success(), "{found}");
    assert!(
        found.contains("server.admin_tls.cert_file: the certificate in `operators.pem` expired"),
        "{found}"
    );
    let mut serve = command();
    serve.args(["--log-json", "serve", "--config", "p.toml"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut gateway = serve.spawn().unwrap();
    let mut addresses = String::new();
    BufReader::new(gateway.stdout.take().unwrap()).read_line(&mut addresses).unwrap();
    // J3.5
    assert!(addresses.contains("listening"), "{addresses:?}");
    let log = BufReader::new(gateway.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut expiries = log.filter(|line| line.contains("certificate expired"));
    let lines = expiries.next().unwrap() + &expiries.next().unwrap();
    for table in ["server.admin_tls", "server.tls"] {
        // J3.6: at the start, and while it serves
        assert!(lines.contains(&format!("{table}.cert_file: ")), "{lines}");
    }
    std::thread::sleep(READINGS);
    kill_process(Pid::from_child(&gateway), Signal::TERM).unwrap();
    // J3.6
    assert_eq!(expiries.next(), None);
    assert!(gateway.wait().unwrap().success());
}
