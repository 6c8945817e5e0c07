//! The gateway as a pod of the files runs it, with a double of the API server.

use std::{collections::BTreeMap, fs, thread, time::Duration};

use pointsman_embedded_policies::LEAST_LOADED;
use pointsman_sim::{Dialect, Role, Sim, SimConfig, SimHandle};
use pointsman_test_api_server::ApiServer;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{container, pod::Pod, strings, yaml};
use crate::process::{LIMIT, Process, ask};

const TOKEN: &str = "token of the service account";

/// A gateway in a process of its own; it ends with the test.
struct Gateway {
    process: Process,
    clients: String,
    admin: String,
}

impl Gateway {
    fn start(pod: &Pod) -> Self {
        let (process, clients, admin) = pod.start();
        Self { process, clients, admin }
    }

    /// Exit code of a probe of the Deployment.
    fn probe(&self, pod: &Pod, name: &str) -> i32 {
        let command = strings(&container("base/deployment.yaml", "containers")[name]["exec"]["command"]);
        let arguments: Vec<&str> = command.iter().skip(1).map(String::as_str).collect();
        let url = format!("http://{}", self.admin);
        pod.run(&arguments, &BTreeMap::from([("POINTSMAN_ADMIN_URL".to_owned(), url)])).0
    }

    fn get(&self, path: &str) -> Value {
        serde_json::from_str(&request(&self.admin, "GET", path, "").1).unwrap()
    }

    fn until(&self, what: &str, check: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        while !check(self) {
            assert!(begun.elapsed() < LIMIT, "{what}: {}", self.get("/discovery"));
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn workers(&self) -> usize {
        self.get("/workers")["workers"].as_array().unwrap().len()
    }
}

/// Status and body of an answer.
fn request(address: &str, method: &str, path: &str, body: &str) -> (u16, String) {
    let text = ask(address, &format!("{method} {path}"), "", body).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// The configuration of the files with free ports and the double as the API server.
fn config(pod: &Pod, api: &ApiServer) -> String {
    fs::write(pod.path("token"), format!("{TOKEN}\n")).unwrap();
    let text = pod.config().replace("0.0.0.0:8080", "127.0.0.1:0").replace("127.0.0.1:9090", "127.0.0.1:0");
    let token = pod.path("token");
    format!("{text}api = \"{}\"\ntoken_file = \"{}\"\nca_file = \"\"\n", api.url(), token.display())
}

/// A double that serves what the Role of the files grants, without `withheld`.
async fn api_server(withheld: &str) -> ApiServer {
    let api = ApiServer::start().await.unwrap();
    api.need_token(TOKEN);
    let rules = yaml("base/role.yaml")["rules"].clone();
    let rule = &rules[0];
    let verbs = strings(&rule["verbs"]);
    let resources = strings(&rule["resources"]);
    let granted: Vec<(&str, &str)> = resources
        .iter()
        .flat_map(|kind| verbs.iter().map(move |verb| (kind.as_str(), verb.as_str())))
        .filter(|(_, verb)| *verb != withheld)
        .collect();
    api.grant_only(&granted);
    api
}

/// A pod of an engine with the labels of the files.
fn engine_pod(sim: &SimHandle) -> Value {
    let port: u16 = sim.url().rsplit(':').next().unwrap().parse().unwrap();
    json!({
        "metadata": {
            "name": "vllm-0",
            "labels": { "pointsman.dev/engine": "vllm", "pointsman.dev/role": "aggregated" },
        },
        "spec": { "containers": [{ "ports": [{ "name": "http", "containerPort": port }] }] },
        "status": { "podIP": "127.0.0.1", "conditions": [{ "type": "Ready", "status": "True" }] },
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n6_the_gateway_of_the_files_serves_and_follows_its_config_maps() {
    let engine = Sim::start(SimConfig::instant(Dialect::Vllm, Role::Aggregated)).await.unwrap();
    let api = api_server("").await;
    let mut pod = Pod::new();
    let text = config(&pod, &api);
    pod.mount("etc/pointsman/config", &[("pointsman.toml", text.as_bytes())]);
    // The optional ConfigMap does not exist yet.
    pod.mount("etc/pointsman/policies.d", &[]);
    let mut gateway = Gateway::start(&pod);
    // N6.2
    assert_eq!((gateway.probe(&pod, "startupProbe"), gateway.probe(&pod, "livenessProbe")), (0, 0));
    assert_eq!(gateway.probe(&pod, "readinessProbe"), 1);
    let mut starting = engine_pod(&engine);
    starting["status"]["conditions"][0]["status"] = json!("False");
    api.put("pods", starting);
    let counted = |gateway: &Gateway| gateway.get("/status")["reasons"].to_string().contains("lists 1 that");
    // P9.15
    gateway.until("the pod that is not ready is counted", counted);
    let chat = json!({ "model": "tiny", "max_tokens": 2, "messages": [{ "role": "user", "content": "hi" }] });
    let (status, body) = request(&gateway.clients, "POST", "/v1/chat/completions", &chat.to_string());
    // P9.15
    assert!(status == 503 && body.contains("discovery lists one that is not ready"), "{body}");
    api.put("pods", engine_pod(&engine));
    // N6.2, N6.3
    gateway.until("it is ready", |gateway| gateway.probe(&pod, "readinessProbe") == 0);
    let (status, body) = request(&gateway.clients, "POST", "/v1/chat/completions", &chat.to_string());
    // N6.2
    assert_eq!(status, 200, "{body}");

    pod.mount("etc/pointsman/policies.d", &[("aggregated.wasm", LEAST_LOADED)]);
    let digest = pointsman_policy_runtime::digest(LEAST_LOADED).to_string();
    // N6.7
    gateway.until("the policy of the ConfigMap serves", |gateway| {
        let slots = gateway.get("/policies")["slots"].as_array().unwrap().clone();
        slots.iter().any(|slot| slot["slot"] == "aggregated" && slot["digest"] == digest.as_str())
    });
    let more = "[[workers]]\nurl = \"http://127.0.0.1:9\"\nrole = \"aggregated\"\nengine = \"vllm\"\n";
    pod.mount("etc/pointsman/config", &[("pointsman.toml", format!("{text}{more}").as_bytes())]);
    // N6.7
    gateway.until("the added worker is there", |gateway| gateway.workers() == 2);

    gateway.process.terminate();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n6_each_verb_of_the_role_is_needed() {
    let engine = Sim::start(SimConfig::instant(Dialect::Vllm, Role::Aggregated)).await.unwrap();
    for verb in ["list", "watch"] {
        let api = api_server(verb).await;
        api.put("pods", engine_pod(&engine));
        let mut pod = Pod::new();
        let text = config(&pod, &api);
        pod.mount("etc/pointsman/config", &[("pointsman.toml", text.as_bytes())]);
        let gateway = Gateway::start(&pod);
        // N6.3
        gateway.until("the source tells the missing verb", |gateway| {
            gateway.get("/discovery").to_string().contains(&format!("cannot {verb}"))
        });
    }
}

/// Values of `config show` by path.
fn shown(pod: &Pod, file: &str, variables: &BTreeMap<String, String>) -> BTreeMap<String, Value> {
    let (code, text) = pod.run(&["config", "show", "--json", "--config", file], variables);
    assert_eq!(code, 0, "{text}");
    let all: Vec<Value> = serde_json::from_str(&text).unwrap();
    all.iter().map(|one| (one["path"].as_str().unwrap().to_owned(), one["value"].clone())).collect()
}

#[test]
fn n6_the_configuration_is_valid_with_each_component_and_has_the_ports_of_the_container() {
    let base = "base/deployment.yaml";
    for component in
        [base, "components/monitoring/deployment.yaml", "components/endpoint-picker/deployment.yaml"]
    {
        let mut pod = Pod::new();
        let (token, ca) = (pod.path("token"), pod.path("ca"));
        fs::write(&token, TOKEN).unwrap();
        let signed = rcgen::generate_simple_self_signed(vec!["pointsman-picker".to_owned()]).unwrap();
        fs::write(&ca, signed.cert.pem()).unwrap();
        pod.mount(
            "etc/pointsman/config",
            &[(
                "pointsman.toml",
                format!("{}token_file = '{}'\nca_file = '{}'\n", pod.config(), token.display(), ca.display())
                    .as_bytes(),
            )],
        );
        for dir in ["admin", "picker"] {
            fs::create_dir(pod.path("etc/pointsman").join(dir)).unwrap();
        }
        fs::write(pod.path("etc/pointsman/admin/token"), "a-token-of-operators").unwrap();
        fs::write(pod.path("etc/pointsman/picker/tls.crt"), signed.cert.pem()).unwrap();
        fs::write(pod.path("etc/pointsman/picker/tls.key"), signed.signing_key.serialize_pem()).unwrap();
        let variables = if component == base { BTreeMap::new() } else { pod.variables(component) };
        let file = pod.path("etc/pointsman/config/pointsman.toml").display().to_string();
        let (code, text) = pod.run(&["check-config", &file], &variables);
        // N6.1
        assert_eq!(code, 0, "{component}: {text}");
        let values = shown(&pod, &file, &variables);
        let mut ports = container(base, "containers")["ports"].as_array().unwrap().clone();
        if component != base {
            ports.extend(container(component, "containers")["ports"].as_array().cloned().unwrap_or_default());
        }
        for port in ports {
            let key = match port["name"].as_str().unwrap() {
                "http" => "server.listen",
                "admin" => "server.admin_listen",
                _ => "ext_proc.listen",
            };
            let own = format!(":{}", port["containerPort"]);
            // N6.1
            assert!(
                values[key].as_str().unwrap().ends_with(&own),
                "{component}: {key} {} {own}",
                values[key]
            );
        }
    }
}
