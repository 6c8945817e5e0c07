//! Registries whose credentials depend on the repository.

use super::{
    Work,
    server::{Auth, Registry},
};

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
