//! Promotions that would take a policy away.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn o5_a_filter_is_not_promoted_over_the_file_that_ranks_behind_it() {
    if Command::new("script").arg("--version").output().is_err() {
        println!("skipped: `script` of util-linux is not installed");
        return;
    }
    let gateway = Gateway::start().await;
    save(&gateway.policies().join("aggregated.formula.toml"), BY_REQUESTS);
    until("the file ranks", || gateway.slot()["source"] == "file");
    let (dir, _) = formula("keep = \"active_requests < 9\"\n");
    let target = Target::of(&gateway);
    let mut dev = Dev::in_terminal(dir.path(), &target.arguments(&[]));
    dev.until("live      shadow, generation ");
    dev.press('p');
    // O5.5
    dev.until("aggregated.formula.toml ranks behind this filter");
    dev.press('y');
    assert_eq!(gateway.slot()["source"], "file");
    fs::remove_file(gateway.policies().join("aggregated.formula.toml")).unwrap();
    until("the default ranks", || gateway.slot()["source"] != "file");
    dev.until("live      shadow, generation ");
    dev.press('p');
    // O5.5
    dev.until("serve all requests with generation ");
    dev.press('q');
    assert_eq!(dev.wait().code(), Some(0), "{}", dev.output());
}
