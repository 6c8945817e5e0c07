//! Registries that are busy, that redirect, and whose tags do not move.

use std::time::Duration;

use super::{
    Work, same,
    server::{Auth, Fault, Registry},
};

fn busy(times: u32, part: &'static str, status: u16, pause: &str) -> Fault {
    Fault::First(times, part, status, ("Retry-After", pause.to_owned()))
}

#[test]
fn o9_a_busy_registry_is_asked_again_within_the_time_that_is_left() {
    let (registry, work) = (Registry::start(Auth::Token(None)), Work::new());
    work.login_ann(&registry);
    let target = format!("{}/policy:1", registry.host());
    // O9.6
    for (part, status) in [("HEAD /v2/", 429), ("POST /v2/", 503), ("PUT /v2/", 502), ("/token", 504)] {
        registry.break_with(busy(2, part, status, "0"));
        let other = format!("{}/policy:{status}", registry.host());
        work.push(&other);
    }
    work.push(&target);
    registry.break_with(busy(1, "GET /v2/policy/blobs/", 503, "1"));
    let pulled = work.run(&["pull", &target]);
    assert!(pulled.code == Some(0) && pulled.took >= Duration::from_secs(1), "{}", pulled.err);
    same(&work.path("least-loaded.wasm"), &work.path("policy.wasm"));

    registry.break_with(busy(9, "GET /v2/policy/manifests/", 503, "0"));
    assert!(work.pull_fails(&target, &[]).err.contains("503 Service Unavailable; try again later"));
    let asked = registry.take_log().iter().filter(|line| line.contains("/manifests/")).count();
    assert_eq!(asked, 3);
    for (pause, timeout) in [("5", "4"), ("61", "600")] {
        registry.break_with(busy(9, "GET /v2/policy/manifests/", 429, pause));
        let ran = work.pull_fails(&target, &["--timeout", timeout]);
        assert!(ran.err.contains("429 Too Many Requests; wait, and try again"), "{}", ran.err);
    }
}

#[test]
fn o9_an_upload_follows_the_registry_to_itself_and_to_no_other_host() {
    let (registry, work) = (Registry::start(Auth::Basic), Work::new());
    let other = Registry::start(Auth::Open);
    work.login_ann(&registry);
    let redirect = |host: &str| {
        let location = format!("{host}/v2/policy/blobs/uploads/");
        Fault::First(1, "POST /v2/", 307, ("Location", location))
    };
    let target = format!("{}/policy:1", registry.host());
    registry.break_with(redirect(&format!("http://{}", other.host())));
    let refused = work.run(&["push", "policy.wasm", &target]);
    let advice =
        format!("307 Temporary Redirect; the registry sends its clients to http://{}: name", other.host());
    // O9.7
    assert!(refused.code == Some(2) && refused.err.contains(&advice), "{}", refused.err);
    assert!(other.take_log().is_empty());
    registry.break_with(redirect(""));
    work.push(&target);
}

#[test]
fn o9_the_messages_about_a_tag_that_does_not_move_and_about_an_index_say_what_to_do() {
    let (registry, work) = (Registry::start(Auth::Open), Work::new());
    let target = format!("{}/policy:1", registry.host());
    let pushed = work.push(&target);
    for status in [405, 409, 412] {
        registry.break_with(busy(1, "PUT /v2/policy/manifests/", status, "0"));
        let refused = work.run(&["push", "policy.wasm", &target]);
        // O9.8
        assert!(refused.code == Some(2) && refused.err.contains("push another tag"), "{}", refused.err);
    }
    let digest = super::digest(&pushed.out);
    let index = format!(
        r#"{{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[
        {{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"{digest}","size":1}}]}}"#
    );
    registry.store("index", index);
    let ran = work.pull_fails(&format!("{}/policy:index", registry.host()), &[]);
    let advice = format!("it is an image index; name one of its manifests by digest: {digest}");
    assert!(ran.err.contains(&advice), "{}", ran.err);
}

#[test]
fn o9_the_credentials_are_those_of_the_longest_path_that_the_repository_is_in() {
    let (registry, work) = (Registry::start(Auth::Token(None)), Work::new());
    let host = registry.host();
    let login = |name: &str, entries: &[(&str, &str)]| {
        let entries = entries.iter().map(|(path, auth)| format!(r#""{host}{path}":{{"auth":"{auth}"}}"#));
        work.login(&format!(r#"{{"auths":{{{}}}}}"#, entries.collect::<Vec<_>>().join(",")));
        work.run(&["push", "policy.wasm", &format!("{host}/{name}:1")])
    };
    // `a:A` and ann, whom the registry knows.
    let (other, ann) = ("YTpB", "YW5uOnA6dw==");
    let pushed = login("org-b/policy", &[("/org-a", other), ("/org-b", ann), ("", other)]);
    // O9.5
    assert_eq!(pushed.code, Some(0), "{}", pushed.err);
    let refused = login("org-b/policy", &[("/org-b", other), ("", ann)]);
    let named = format!("the credentials used are those for {host}/org-b in ");
    assert!(refused.code == Some(2) && refused.err.contains(&named), "{}", refused.err);
    registry.take_log();
    let refused = login("org-b/policy", &[("/org-a", ann), ("/org", ann)]);
    assert!(refused.code == Some(2) && refused.err.contains("has no credentials for"), "{}", refused.err);
    assert!(!registry.take_log().iter().any(|line| line.ends_with("Basic")));
}
