//! Values of the chart that depend on each other, with the real `helm`.

use super::*;

/// Seconds that a pod has to end.
fn grace_period(helm: &Helm, values: &[&str]) -> u64 {
    let chart = objects(&helm.template(values).unwrap());
    let pod = &chart["Deployment/pointsman"]["spec"]["template"]["spec"];
    pod["terminationGracePeriodSeconds"].as_u64().unwrap()
}

#[test]
fn n6_a_pod_gets_the_time_that_its_configuration_asks_for() {
    let Some(helm) = Helm::installed() else { return };
    let whole = |text: &str| format!("--set=configToml=[timeouts]\n{text}");
    for (values, seconds) in [
        (&["config.timeouts.drain_delay=1m 30s"][..], 5 + 90 + 120 + 15),
        (&["config.timeouts.drain_delay=500ms", "preStopSeconds=0"], 120 + 15),
        (&[&whole("drain = '10m'")], 5 + 600 + 15),
        (&[&whole("drain = '2h'\ndrain_delay = '20s'")], 5 + 20 + 7200 + 15),
        // The default of `timeouts.drain`.
        (&[&whole("request = '2h'"), "drainSeconds=1"], 5 + 30 + 15),
    ] {
        // N6.4
        assert_eq!(grace_period(&helm, values), seconds, "{values:?}");
    }
    let refused = helm.template(&["config.timeouts.drain_delay=1day"]).unwrap_err();
    // N6.4
    assert!(refused.contains(r#"config.timeouts.drain_delay is "1day": write it as in 1h"#), "{refused}");
}
