//! `policy push` and `pull` with registries: the real binary, real sockets, registries that misbehave.

#![allow(clippy::expect_used, clippy::disallowed_types, reason = "helpers of tests")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use crate::authority::Authority;
use server::{Auth, Fault, IDENTITY, Registry, USER, docker_config};

mod busy;
mod server;

/// Upper bound of bytes that a registry gets rid of before its client closes the connection: the client's
/// limit and the buffers of two sockets.
const BUFFERED_BYTES: u64 = 24 << 20;

/// A directory with a policy, its signature and Docker's configuration.
struct Work {
    directory: tempfile::TempDir,
}

/// Result of one run of the binary.
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
    took: Duration,
}

impl Work {
    fn new() -> Self {
        let work = Self { directory: tempfile::tempdir().expect("a directory") };
        let bytes = pointsman_embedded_policies::by_name("least-loaded").expect("embedded");
        fs::write(work.path("policy.wasm"), bytes).expect("written");
        fs::write(work.path("policy.wasm.minisig"), "untrusted comment: a signature\nabc\n")
            .expect("written");
        docker_config(work.directory.path(), "{}");
        work
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn login(&self, config: &str) {
        docker_config(self.directory.path(), config);
    }

    /// Logs ann in, as `docker login` does.
    fn login_ann(&self, registry: &Registry) {
        assert_eq!(USER, ("ann", "p:w"));
        self.login(&format!(r#"{{"auths":{{"{}":{{"auth":"YW5uOnA6dw=="}}}}}}"#, registry.host()));
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        let path = format!("{}:{}", self.directory.path().display(), std::env::var("PATH").expect("PATH"));
        let started = Instant::now();
        let output = Command::new(crate::programs::pointsman())
            .current_dir(&self.directory)
            .env("DOCKER_CONFIG", self.path("docker"))
            .env("PATH", path)
            .arg("policy")
            .args(arguments)
            .output()
            .expect("the binary runs");
        Ran {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).expect("text"),
            err: String::from_utf8(output.stderr).expect("text"),
            took: started.elapsed(),
        }
    }

    fn push(&self, target: &str) -> Ran {
        let ran = self.run(&["push", "policy.wasm", target]);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        ran
    }

    /// Pulls and checks that nothing is written.
    #[track_caller]
    fn pull_fails(&self, source: &str, more: &[&str]) -> Ran {
        let ran = self.run(&[&["pull", source, "-o", "bad.wasm"], more].concat());
        assert_eq!(ran.code, Some(2), "{}{}", ran.out, ran.err);
        assert!(ran.err.starts_with(&format!("pointsman: cannot pull {source}: ")), "{}", ran.err);
        assert!(ran.err.contains("; "), "the message says what to do: {}", ran.err);
        assert!(!self.path("bad.wasm").exists() && !self.path("bad.wasm.minisig").exists());
        ran
    }
}

#[track_caller]
fn same(left: &Path, right: &Path) {
    assert!(fs::read(left).expect("read") == fs::read(right).expect("read"), "{left:?} and {right:?}");
}

fn digest(text: &str) -> String {
    let start = text.find("manifest sha256:").expect("a digest") + "manifest ".len();
    text[start..start + 71].to_owned()
}

#[test]
fn a_policy_and_its_signature_travel_through_a_registry_by_tag_and_by_digest() {
    let (registry, work) = (Registry::start(Auth::Open), Work::new());
    let target = format!("{}/team/policy:1.0", registry.host());
    let pushed = work.push(&target);
    let pulled = work.run(&["pull", &target]);
    assert_eq!(pulled.code, Some(0), "{}", pulled.err);
    same(&work.path("least-loaded.wasm"), &work.path("policy.wasm"));
    same(&work.path("least-loaded.wasm.minisig"), &work.path("policy.wasm.minisig"));
    assert_eq!(pushed.out.lines().last(), pulled.out.lines().last(), "both print the digest of the policy");
    assert_eq!(digest(&pushed.out), digest(&pulled.out), "both print the digest of the manifest");

    registry.take_log();
    let pinned = format!("oci://{}@{}", target, digest(&pushed.out));
    let pulled = work.run(&["pull", &pinned, "-o", "pinned.wasm"]);
    assert_eq!(pulled.code, Some(0), "{}", pulled.err);
    same(&work.path("pinned.wasm"), &work.path("policy.wasm"));
    let log = registry.take_log();
    assert!(log[0].ends_with(&format!("/manifests/{}", digest(&pushed.out))), "{log:?}");

    work.push(&target);
    let log = registry.take_log();
    let again = log.iter().filter(|line| line.starts_with("POST")).count();
    assert_eq!(again, 0, "content that the registry has is not uploaded again: {log:?}");

    let layout = work.run(&["push", "policy.wasm", "oci:layout:1.0"]);
    assert_eq!(digest(&layout.out), digest(&pushed.out), "a layout and a registry hold the same manifest");

    let other = format!("{}/team/policy@sha256:{}", registry.host(), "0".repeat(64));
    let ran = work.run(&["push", "policy.wasm", &other]);
    assert!(ran.code == Some(2) && ran.err.contains("the reference says sha256:000"), "{}", ran.err);
}

#[test]
fn a_token_server_gets_the_credentials_and_the_registry_only_its_token() {
    let (registry, work) = (Registry::start(Auth::Token(None)), Work::new());
    let target = format!("{}/team/policy:1", registry.host());
    let refused = work.run(&["push", "policy.wasm", &target]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("401 Unauthorized: wrong user or password"), "{}", refused.err);
    assert!(
        refused.err.contains("docker login") && refused.err.contains("has no credentials"),
        "{}",
        refused.err
    );

    work.login_ann(&registry);
    registry.take_log();
    work.push(&target);
    let log = registry.take_log();
    let tokens: Vec<_> = log.iter().filter(|line| line.contains(" /token?")).collect();
    let scope = "scope=repository%3Ateam%2Fpolicy%3Apull%2Cpush&service=reg Basic";
    assert!(tokens.len() == 1 && tokens[0].ends_with(scope), "{log:?}");
    let rest = log.iter().filter(|line| !line.contains(" /token?")).skip(1);
    assert!(rest.clone().all(|line| line.ends_with(" Bearer")) && rest.count() >= 5, "{log:?}");

    let config = format!(r#"{{"auths":{{"{}":{{"identitytoken":"{IDENTITY}"}}}}}}"#, registry.host());
    work.login(&config);
    let pulled = work.run(&["pull", &target]);
    assert_eq!(pulled.code, Some(0), "{}", pulled.err);
    let log = registry.take_log();
    assert!(log.iter().any(|line| line == "POST /token"), "an identity token is sent in a form: {log:?}");
}

#[test]
fn a_password_comes_from_the_file_or_from_a_credential_helper() {
    let (registry, work) = (Registry::start(Auth::Basic), Work::new());
    let target = format!("{}/policy:1", registry.host());
    let refused = work.run(&["push", "policy.wasm", &target]);
    assert!(
        refused.code == Some(2) && refused.err.contains("asks for a user and a password"),
        "{}",
        refused.err
    );
    work.login_ann(&registry);
    work.push(&target);

    let helper = |script: &str| {
        use std::os::unix::fs::PermissionsExt as _;
        let path = work.path("docker-credential-test");
        fs::write(&path, format!("#!/bin/sh\nread -r host\n{script}\n")).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
    };
    let config = format!(r#"{{"credHelpers":{{"{}":"test"}}}}"#, registry.host());
    work.login(&config);
    helper(r#"[ "$1" = get ] && echo "{\"ServerURL\":\"$host\",\"Username\":\"ann\",\"Secret\":\"p:w\"}""#);
    assert_eq!(work.run(&["pull", &target]).code, Some(0));
    helper("echo credentials not found in native keychain; exit 1");
    assert!(work.pull_fails(&target, &[]).err.contains("asks for a user and a password"));
    for (script, part) in [
        ("echo the agent is locked; exit 1", "docker-credential-test failed: the agent is locked"),
        ("echo hello", "something other than JSON"),
        ("exec yes", "more than 65536 bytes"),
    ] {
        helper(script);
        let ran = work.pull_fails(&target, &[]);
        assert!(ran.err.contains(part), "{}", ran.err);
    }
    helper("exec sleep 20");
    let ran = work.pull_fails(&target, &["--timeout", "1"]);
    assert!(ran.err.contains("did not end within 1 s") && ran.took < Duration::from_secs(10), "{}", ran.err);
}

#[test]
fn changed_content_is_refused_whoever_claims_its_digest() {
    let (registry, work) = (Registry::start(Auth::Open), Work::new());
    let target = format!("{}/policy:1", registry.host());
    let pushed = work.push(&target);
    let pinned = format!("{}/policy@{}", registry.host(), digest(&pushed.out));
    registry.break_with(Fault::Changed("/manifests/"));
    let ran = work.pull_fails(&pinned, &[]);
    assert!(
        ran.err.contains("the reference says") && ran.err.contains("it was changed or cut"),
        "{}",
        ran.err
    );
    registry.break_with(Fault::Changed("/blobs/"));
    for source in [&target, &pinned] {
        let ran = work.pull_fails(source, &[]);
        assert!(ran.err.contains("it was changed or cut"), "{}", ran.err);
    }
    registry.break_with(Fault::Cut);
    assert!(work.pull_fails(&target, &[]).err.contains("GET http://"), "a body that ends early");
    registry.break_with(Fault::Announced(1 << 40));
    assert!(work.pull_fails(&target, &[]).err.contains("announces 1099511627776 bytes; the limit is"));
}

#[test]
fn an_answer_without_an_end_is_read_up_to_its_limit() {
    let (registry, work) = (Registry::start(Auth::Token(None)), Work::new());
    work.login_ann(&registry);
    let target = format!("{}/policy:1", registry.host());
    work.push(&target);
    for part in ["/manifests/", "/blobs/", "/token"] {
        registry.break_with(Fault::Endless(part));
        let ran = work.pull_fails(&target, &["--timeout", "20"]);
        assert!(ran.err.contains("is larger than expected; the limit is"), "{part}: {}", ran.err);
        assert!(registry.sent() > 0 && registry.sent() < BUFFERED_BYTES, "{part}: {} bytes", registry.sent());
    }
}

#[test]
fn the_reason_of_an_error_is_read_up_to_its_limit() {
    let (registry, work) = (Registry::start(Auth::Open), Work::new());
    let target = format!("{}/policy:1", registry.host());
    registry.break_with(Fault::EndlessStatus(502));
    let ran = work.pull_fails(&target, &["--timeout", "20"]);
    assert!(ran.err.contains("502 Bad Gateway; try again later"), "{}", ran.err);
    assert!(registry.sent() < BUFFERED_BYTES, "{} bytes", registry.sent());
}

#[test]
fn a_registry_that_hangs_or_fails_ends_with_a_message() {
    let (registry, work) = (Registry::start(Auth::Open), Work::new());
    let target = format!("{}/policy:1", registry.host());
    work.push(&target);
    for fault in [Fault::Hang("/manifests/"), Fault::Hang("/blobs/"), Fault::Stalled("/blobs/")] {
        registry.break_with(fault.clone());
        let ran = work.pull_fails(&target, &["--timeout", "1"]);
        let late = ran.err.contains("made no progress for 1 s") || ran.err.contains("did not end within 1 s");
        assert!(late && ran.took < Duration::from_secs(10), "{fault:?}: {}", ran.err);
    }
    for (status, body, part) in [
        (
            500,
            "<html>\u{1b}[31mbusy</html>",
            "500 Internal Server Error: <html>\\u{1b}[31mbusy</html>; try again",
        ),
        (429, "", "429 Too Many Requests; wait"),
        (403, r#"{"errors":[{"code":"DENIED","message":"not yours"}]}"#, "DENIED: not yours; log in"),
        (204, "", "204 No Content; check"),
    ] {
        registry.break_with(Fault::Status(status, body));
        let ran = work.pull_fails(&target, &[]);
        assert!(ran.err.contains(part), "{}", ran.err);
        assert_eq!(work.run(&["push", "policy.wasm", &target]).code, Some(2), "{status}");
    }
    registry.break_with(Fault::None);
    let missing = format!("{}/policy:2", registry.host());
    let ran = work.pull_fails(&missing, &[]);
    assert!(ran.err.contains("NOT_FOUND: no such content; check the repository and the tag"), "{}", ran.err);
    drop(registry);
    assert!(work.pull_fails(&target, &[]).err.contains("check the host and the port"));
}

#[test]
fn a_redirect_is_followed_without_credentials_and_only_so_often() {
    let (registry, storage, work) = (Registry::start(Auth::Basic), Registry::start(Auth::Open), Work::new());
    work.login_ann(&registry);
    let target = format!("{}/policy:1", registry.host());
    work.push(&target);
    storage.copy_content(&registry);
    registry.break_with(Fault::Redirected(format!("http://{}", storage.host())));
    let pulled = work.run(&["pull", &target]);
    assert_eq!(pulled.code, Some(0), "{}", pulled.err);
    let log = storage.take_log();
    assert!(
        log.len() == 2 && log.iter().all(|line| line.ends_with("?signature=s")),
        "no credentials: {log:?}"
    );

    registry.break_with(Fault::Redirected("loop".to_owned()));
    assert!(work.pull_fails(&target, &[]).err.contains("was redirected more than 5 times"));
    registry.break_with(Fault::Redirected("http://storage.example".to_owned()));
    assert!(
        work.pull_fails(&target, &[]).err.contains("http://storage.example"),
        "plain text off this machine"
    );
}

#[test]
fn a_hostile_location_or_token_is_a_message_and_no_credentials_leave_the_machine() {
    let (registry, work) = (Registry::start(Auth::Open), Work::new());
    let target = format!("{}/policy:1", registry.host());
    for location in ["http://[", "ftp://127.0.0.1/x", "http://storage.example/x"] {
        registry.break_with(Fault::Location(location));
        let ran = work.run(&["push", "policy.wasm", &target]);
        assert_eq!(ran.code, Some(2), "{}", ran.err);
        assert!(ran.err.contains("the registry sends its client to"), "{location}: {}", ran.err);
    }
    let registry = Registry::start(Auth::Token(None));
    work.login_ann(&registry);
    let target = format!("{}/policy:1", registry.host());
    for answer in ["", "[]", r#"{"token":""}"#, r#"{"token":"a\r\nb"}"#, r#"{"token":7}"#] {
        registry.break_with(Fault::Token(answer));
        let ran = work.pull_fails(&target, &[]);
        assert!(ran.err.contains("contains no valid token"), "{answer}: {}", ran.err);
    }
    for realm in ["http://auth.example/token", "not a url", "file:///etc/passwd"] {
        let registry = Registry::start(Auth::Token(Some(realm.to_owned())));
        let ran = work.pull_fails(&format!("{}/policy:1", registry.host()), &[]);
        assert!(ran.err.contains("the registry"), "{realm}: {}", ran.err);
    }
}

#[test]
fn tls_with_a_private_root_works_and_a_wrong_root_is_refused() {
    let authority = Authority::new("127.0.0.1");
    let (registry, work) = (Registry::start_tls(Auth::Basic, &authority), Work::new());
    work.login_ann(&registry);
    fs::write(work.path("ca.pem"), &authority.pem).expect("written");
    fs::write(work.path("other.pem"), Authority::new("127.0.0.1").pem).expect("written");
    fs::write(work.path("none.pem"), "no certificate").expect("written");
    let target = format!("{}/policy:1", registry.host());
    let pushed = work.run(&["push", "policy.wasm", &target, "--tls-ca", "ca.pem"]);
    assert_eq!(pushed.code, Some(0), "{}", pushed.err);
    let pulled = work.run(&["pull", &target, "--tls-ca", "ca.pem"]);
    assert_eq!(pulled.code, Some(0), "{}", pulled.err);
    same(&work.path("least-loaded.wasm"), &work.path("policy.wasm"));

    let ran = work.pull_fails(&target, &["--tls-ca", "other.pem"]);
    assert!(ran.err.contains("UnknownIssuer") && ran.err.contains("--tls-ca"), "{}", ran.err);
    for (file, part) in [("none.pem", "the file has no certificate"), ("missing.pem", "No such file")] {
        let ran = work.pull_fails(&target, &["--tls-ca", file]);
        assert!(ran.err.contains(part), "{}", ran.err);
    }
    let elsewhere = Authority::new("other.example");
    let registry = Registry::start_tls(Auth::Open, &elsewhere);
    fs::write(work.path("ca.pem"), &elsewhere.pem).expect("written");
    let ran = work.pull_fails(&format!("{}/policy:1", registry.host()), &["--tls-ca", "ca.pem"]);
    assert!(ran.err.contains("valid for this host"), "{}", ran.err);
    let plain = Registry::start(Auth::Open);
    let ran = work.pull_fails(&format!("{}/policy:1", plain.host()), &["--tls-ca", "ca.pem"]);
    assert!(ran.err.contains("does not speak TLS"), "{}", ran.err);
}
