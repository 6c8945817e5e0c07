//! Values of the chart that depend on each other, with the real `helm`.

use super::{
    rendered::{CUSTOM_RESOURCES, Refused, are_refused},
    *,
};

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
        (&["config.timeouts.drain_delay=1min 30sec"], 5 + 90 + 120 + 15),
        (&[&whole("drain = '10m'")], 5 + 600 + 15),
        (&[&whole("drain = '10s'")], 5 + 10 + 15),
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
    let refused = helm.template(&["--set=configToml=[timeouts"]).unwrap_err();
    // N6.4
    assert!(refused.contains("configToml cannot be read: toml: line 1: "), "{refused}");
}

#[test]
fn n6_monitors_send_the_token_when_reads_need_it() {
    let Some(helm) = Helm::installed() else { return };
    let monitors = ["monitoring.enabled=true", CUSTOM_RESOURCES[0]];
    let pods = ["monitoring.serviceMonitor.enabled=false", "monitoring.podMonitor.enabled=true"];
    let of_services = |more: &[&str]| {
        let chart = objects(&helm.template(&[&monitors[..], more].concat()).unwrap());
        chart["ServiceMonitor/pointsman"]["spec"]["endpoints"][0]["authorization"].clone()
    };
    let token = |secret: &str| serde_json::json!({ "credentials": { "name": secret, "key": "token" } });
    let reads = "config.server.admin_token_reads=true";
    // N6.15
    assert_eq!(of_services(&[reads]), token("pointsman-admin"));
    // N6.15
    assert_eq!(of_services(&[reads, "monitoring.adminTokenSecret=own"]), token("own"));
    let whole = "--set=configToml=[server]\nadmin_token_reads = true";
    // N6.15
    assert_eq!(of_services(&[whole]), token("pointsman-admin"));
    // N6.15
    assert_eq!(of_services(&[]), Value::Null);
    let chart = objects(&helm.template(&[&monitors[..], &pods, &[reads]].concat()).unwrap());
    let endpoint = &chart["PodMonitor/pointsman"]["spec"]["podMetricsEndpoints"][0];
    // N6.15
    assert_eq!(endpoint["authorization"], token("pointsman-admin"));
}

#[test]
fn n6_tls_of_operators_is_refused_where_the_chart_would_ask_without_it() {
    let Some(helm) = Helm::installed() else { return };
    let tls = ["config.server.admin_tls.cert_file=/a", "config.server.admin_tls.key_file=/b"];
    let url = ["env[0].name=POINTSMAN_ADMIN_URL", "env[0].value=https://localhost:9090"];
    let monitors = ["monitoring.enabled=true", CUSTOM_RESOURCES[0]];
    let cases: Refused<'_> = &[
        (&tls, "config.server.admin_tls: the probes ask http://127.0.0.1:9090, which speaks TLS then"),
        (
            &["--set=configToml=[server.admin_tls]\ncert_file = '/a'\nkey_file = '/b'"],
            "configToml: server.admin_tls: the probes ask http://127.0.0.1:9090",
        ),
        (&[tls[0], tls[1], url[0], "env[0].value=http://localhost:9090"], "which speaks TLS then"),
        (
            &[tls[0], tls[1], url[0], url[1], monitors[0], monitors[1]],
            "monitoring.serviceMonitor and monitoring.podMonitor scrape over HTTP",
        ),
    ];
    are_refused(&helm, cases);
    let off = "monitoring.serviceMonitor.enabled=false";
    for values in [&[tls, url].concat()[..], &[&[tls, url, monitors].concat()[..], &[off]].concat()] {
        // N6.9
        assert_eq!(helm.template(values).err(), None, "{values:?}");
    }
}

#[test]
fn n6_engines_and_registries_that_the_network_policy_blocks_are_refused() {
    let Some(helm) = Helm::installed() else { return };
    let policy = "networkPolicy.enabled=true";
    let (selector, engines) = ("engines.discovery.selector=app=vllm", "--set-json=networkPolicy.engines");
    let registry = ["policies.source=registry", "policies.registry.artifacts[0].file=a.wasm"];
    let reference = |text: &str| format!("policies.registry.artifacts[0].reference={text}");
    let (inside, outside) = (reference("registry.infra.svc:5000/p:1"), reference("registry.example/p:1"));
    let refused: Refused<'_> = &[
        (&[policy, selector], "engines.discovery.selector (app=vllm) finds others"),
        (&[policy, "engines.discovery.selector=!pointsman.dev/engine"], "finds others"),
        (
            &[policy, registry[0], registry[1], &inside],
            "policies.registry.artifacts[0].reference (https://registry.infra.svc:5000)",
        ),
        (
            &[policy, "config.workers[0].url=http://10.0.0.5:8000"],
            "config.workers[0].url (http://10.0.0.5:8000)",
        ),
        (
            &[policy, "config.discovery.dns[0].servers={10.0.0.1:8600}"],
            "config.discovery.dns[0].servers (10.0.0.1:8600)",
        ),
    ];
    are_refused(&helm, refused);
    let labels = format!(r#"{engines}=[{{"podSelector":{{"matchLabels":{{"app":"vllm"}}}}}}]"#);
    for values in [
        &[policy, selector, &labels][..],
        &[policy, "engines.discovery.selector=pointsman.dev/engine=vllm"],
        &[policy, r"engines.discovery.selector=pointsman.dev/engine in (vllm\,sglang)\,tier=a"],
        &[policy, registry[0], registry[1], &outside],
        &[policy, "config.workers[0].url=http://decode.serving.svc:8000"],
        &[policy, "config.discovery.dns[0].servers={10.0.0.1:53}"],
        &[policy, "config.discovery.dns[0].servers={127.0.0.1:8600}"],
        &[policy, "config.discovery.dns[0].servers={[::1]:8600}"],
    ] {
        // N6.9
        assert_eq!(helm.template(values).err(), None, "{values:?}");
    }
}

#[test]
fn n6_ports_of_engines_that_the_pool_does_not_have_are_refused() {
    let Some(helm) = Helm::installed() else { return };
    let picker = ["endpointPicker.enabled=true", CUSTOM_RESOURCES[1]];
    let cases: Refused<'_> = &[
        (
            &[picker[0], picker[1], "engines.discovery.port=8200"],
            "the pool has 8000, and the gateways choose port 8200",
        ),
        (
            &[picker[0], picker[1], r"engines.discovery.port=8000\,8001"],
            "the pool has 8000, and the gateways choose port 8001",
        ),
    ];
    are_refused(&helm, cases);
    let ports = "endpointPicker.inferencePool.targetPorts={8000,8001}";
    for port in
        ["engines.discovery.port=http", "engines.discovery.port=8000", r"engines.discovery.port=8000\,8001"]
    {
        // N6.9
        assert_eq!(helm.template(&[picker[0], picker[1], ports, port]).err(), None, "{port}");
    }
}
