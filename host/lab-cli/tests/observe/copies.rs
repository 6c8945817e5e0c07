//! Copies that a client or a proxy sends in another form, and engines that tell less than was asked of them.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt as _, net::TcpStream, time::Instant};

use super::scene::{LAB, Scene, client, metrics_server};

/// Sends a body to a path of the observer.
async fn copy(scene: &Scene, path: &str, body: &Value) {
    let request = client().post(format!("http://127.0.0.1:{}{path}", scene.port)).body(body.to_string());
    assert_eq!(request.send().await.unwrap().status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_lists_of_one_prompt_are_recorded_and_other_paths_are_named() {
    let metrics = "ray_vllm_num_requests_running{model_name=\"m\"} 0\n".to_owned();
    let ray = metrics_server(metrics, Duration::ZERO).await;
    let scene = Scene::start(&["--workers", &ray]).await;
    for number in 0..20 {
        let prompt = format!("{number} {}", "word ".repeat(40));
        copy(&scene, "/v1/completions", &json!({"prompt": [prompt]})).await;
        copy(&scene, "/copy?key=sk-secret", &json!({"prompt": prompt})).await;
    }
    copy(&scene, "/openai/v1/completions", &json!({"prompt": "a"})).await;
    copy(&scene, "/v1/completions", &json!({"prompt": ["a", "b"]})).await;
    let printed = scene.dir.path().join("printed");
    let text = scene.observer.end(&printed);
    // S5.13
    let kept = "21 copies arrived, 20 are in the trace, missed: 1 several prompts in one body.";
    assert!(text.contains(kept), "{text}");
    // S5.18
    let other = "21 requests came to other paths than /v1/chat/completions and /v1/completions and were not recorded, \
                 e.g. /copy (20), /openai/v1/completions (1)";
    assert!(text.contains(other) && !text.contains("sk-secret"), "{text}");
    // S5.16
    assert!(!text.contains("has no metrics") && !text.contains("none of"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_kv_events_that_do_not_come_are_named() {
    let engine = metrics_server("vllm:num_requests_running 0\n".to_owned(), Duration::ZERO).await;
    let gone = format!("tcp://127.0.0.1:{}", pointsman_rig::fleet::free_port().unwrap());
    let scene = Scene::start(&["--workers", &engine, "--kv-events", &gone]).await;
    for number in 0..20 {
        copy(&scene, "/v1/completions", &json!({"prompt": [number, 2, 3]})).await;
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    let printed = scene.dir.path().join("printed");
    let text = scene.observer.end(&printed);
    // S5.19
    assert!(text.contains(&format!("warning: {gone}: no KV events can be read")), "{text}");
    // S5.19
    assert!(text.contains(&format!("warning: {engine}: its KV events could not be read")), "{text}");
    // S5.19
    assert!(!text.contains("Give the engines' KV events"), "{text}");
    let mut command = std::process::Command::new(LAB);
    command.args(["observe", "--workers", &engine, "--kv-events", "127.0.0.1:5557", "--out"]);
    let output = command.arg(scene.dir.path().join("other")).output().unwrap();
    // S5.19
    assert_eq!(output.status.code(), Some(2));
    let mut command = std::process::Command::new(LAB);
    command.args(["observe", "--workers", &engine, "--for", "0s", "--out"]);
    let no_time = command.arg(scene.dir.path().join("other")).output().unwrap();
    // S5.20
    assert!(no_time.status.code() == Some(2), "{no_time:?}");
    let text = String::from_utf8(output.stderr).unwrap();
    // S5.19
    assert!(text.contains("--kv-events 127.0.0.1:5557: not the address of KV events"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_20_the_time_is_that_of_the_copies_also_when_the_writer_lags() {
    let engine = metrics_server("vllm:num_requests_running 0\n".to_owned(), Duration::ZERO).await;
    let begun = Instant::now();
    let scene = Scene::start(&["--workers", &engine]).await;
    let body = json!({"prompt": vec![1; 500_000]});
    for _ in 0..8 {
        copy(&scene, "/v1/completions", &body).await;
    }
    let mut half = TcpStream::connect(("127.0.0.1", scene.port)).await.unwrap();
    let begin = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{\"prompt\":";
    half.write_all(begin).await.unwrap();
    // The head arrives.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (printed, seconds) = (scene.dir.path().join("printed"), begun.elapsed().as_secs_f64());
    let text = scene.observer.end(&printed);
    let told = text.split("Observed for ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    // S5.20
    assert!(told.parse::<f64>().unwrap() <= seconds + 1.0, "{seconds}: {text}");
    // S5.20
    assert!(text.contains("9 copies arrived, 8 are in the trace, missed: 1 body incomplete."), "{text}");
}
