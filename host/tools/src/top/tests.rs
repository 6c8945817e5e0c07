use serde_json::{Value, json};

use super::{events::Event, keys::Action, model::Sort, *};

fn worker(id: u64, active: u64, kv_usage: f64) -> Value {
    worker_at(id, &format!("10.0.0.{id}:8000"), active, kv_usage)
}

fn worker_at(id: u64, address: &str, active: u64, kv_usage: f64) -> Value {
    json!({
        "id": id, "spec": { "url": format!("http://{address}"), "role": "prefill", "engine": "vllm" },
        "models": ["tiny"], "draining": false, "ineligible": null, "reason": null,
        "engine_load": { "running": 1, "waiting": 3, "kv_usage": kv_usage },
        "ranks": [{ "active_requests": active, "ttft_ewma_us": 41_000, "itl_ewma_us": 0, "error_ppm": 0 }],
    })
}

fn model() -> Model {
    let mut model = Model { url: "http://g:9090".to_owned(), ..Model::default() };
    let slot = json!({
        "slot": "prefill", "model": null, "state": "active", "generation": 3, "policy": "kv-aware",
        "version": "1.0.0", "digest": "9e9a001122334455", "calls": 7, "failures": 0, "breaker_open": false,
        "canary": null, "shadow": { "generation": 4, "share": 0.5, "policy": "least-loaded" },
    });
    let decision = |worker: u64, reported: u64| {
        json!({
            "leg": "prefill", "choice": { "worker": worker },
            "outcome": { "prompt_tokens": 50, "cached_tokens": { "reported": reported } },
        })
    };
    for (kind, data) in [
        ("hello", json!({ "version": "0.1.0", "token": false, "may_change": true })),
        ("workers", json!({ "workers": [worker(1, 2, 0.1), worker(2, 9, 0.9)] })),
        ("slots", json!({ "slots": [slot] })),
        ("decisions", json!({ "decisions": [decision(1, 16), decision(1, 0)] })),
        (
            "stats",
            json!({ "requests_per_second": 12.5, "errors_per_second": 0.5, "ttft_p50_ms": 41.0,
            "queue": { "waiting": 5, "waiting_bytes": 2048 } }),
        ),
        ("later", json!("ignored")),
    ] {
        model.apply(&Event { kind: kind.to_owned(), data: data.to_string() }).unwrap();
    }
    model
}

fn text(model: &Model, view: &View) -> String {
    text_of(model, view, 80, 24).unwrap()
}

#[test]
fn a_frame_of_80_by_24_has_everything() {
    let model = model();
    assert!(model.is_complete());
    let frame = text(&model, &View::default());
    assert_eq!(frame.lines().count(), 24);
    for part in [
        "pointsman 0.1.0 live  http://g:9090",
        "requests  12.5/s, errors (5xx) 0.5/s (4.0 %), refusals (4xx) 0.0/s, 0 in flight",
        "TTFT      p50 41 ms, p90 -, p99 -",
        "queue     5 waiting, 2.0 KiB;",
        "workers   2 of 2 eligible",
        "1 10.0.0.1:8000",
        "prefill              kv-aware@3",
        "9e9a00112233",
        "q quit",
    ] {
        // O3.1
        assert!(frame.contains(part), "{part}\n{frame}");
    }
    let mut long = model.clone();
    let workers = json!({ "workers": [worker_at(1, "127.0.0.1:33951", 2, 0.1)] }).to_string();
    long.apply(&Event { kind: "workers".to_owned(), data: workers }).unwrap();
    let frame_of_long = text(&long, &View::default());
    // O3.1: the end of an address tells workers apart.
    assert!(frame_of_long.contains("1 …7.0.0.1:33951 prefill"), "{frame_of_long}");
    long.slots[0].policy = "predicted-latency".to_owned();
    // O3.1
    assert!(text(&long, &View::default()).contains(" predicted-latency@3 "));
    (long.slots[0].policy, long.slots[0].generation) = ("a-rule-with-a-name-that-is-long".to_owned(), 1_234);
    // O3.1: the end of a long name is cut, and not the generation.
    assert!(text(&long, &View::default()).contains(" a-rule-with-a-name-that-is-…@1234 "));
    let row = frame.lines().find(|line| line.contains("10.0.0.1:8000")).unwrap();
    let cells: Vec<&str> = row.split_whitespace().collect();
    // O3.1, O3.7
    assert_eq!(
        cells[2..],
        ["prefill", "eligible", "2", "3", "10", "%", "16", "%", "41", "ms", "-"],
        "{frame}"
    );
    for (width, height) in [(40, 12), (200, 60)] {
        // O3.1
        assert!(text_of(&model, &View::default(), width, height).unwrap().contains("pointsman 0.1.0"));
    }
}

#[test]
fn t1_the_digests_of_filters_stand_before_the_one_that_ranks() {
    let mut model = model();
    let part = |world: &str, digest: &str| json!({ "world": world, "digest": digest });
    model.slots[0].parts =
        serde_json::from_value(json!([part("filter", "aabbccddeeff0011"), part("selector", "9e9a001122")]))
            .unwrap();
    let frame = |width| text_of(&model, &View::default(), width, 24).unwrap();
    // T1.2
    assert!(frame(67).contains(" aabbccdd+9e9a0011  active\n"), "{}", frame(67));
    // T1.2
    assert!(frame(80).contains(" aabbccddeeff+9e9a00112233 active\n"), "{}", frame(80));
}

#[test]
fn o3_a_gateway_that_is_not_ready_says_why_and_trials_are_whole() {
    let mut model = model();
    let stats = |ready: bool, reasons: &[&str]| Event {
        kind: "stats".to_owned(),
        data: json!({ "ready": ready, "reasons": reasons }).to_string(),
    };
    model.apply(&stats(false, &["no worker is registered"])).unwrap();
    // O3.8
    assert!(
        text(&model, &View::default())
            .starts_with("pointsman 0.1.0 live, not ready: no worker is registered")
    );
    model.apply(&stats(true, &["worker 9: no KV events", "another"])).unwrap();
    // O3.8
    assert!(
        text(&model, &View::default()).starts_with("pointsman 0.1.0 live (1 of 2): worker 9: no KV events")
    );
    let trial =
        json!({ "generation": 5, "share": 0.2, "policy": "queue-kv-prefix", "digest": "12345678abcd99" });
    model.slots[0].canary = serde_json::from_value(trial).unwrap();
    let shadow = model.slots[0].shadow.as_mut().unwrap();
    (shadow.agree, shadow.disagree) = (3, 1);
    let frame = text(&model, &View::default());
    for line in [
        "  canary 20 %        queue-kv-prefix@5 12345678abcd",
        "  shadow 50 %        least-loaded@4    -            agrees 75 %",
    ] {
        // O3.1
        assert!(frame.contains(line), "{line}\n{frame}");
    }
}

#[test]
fn o3_a_small_frame_has_whole_columns_and_the_help_is_broken_between_words() {
    let mut model = model();
    let hashed = json!({ "workers": [worker_at(9_007_199_254_740_993, "10.0.0.9:8000", 1, 0.1),
                                     worker_at(9_007_199_254_740_994, "10.0.0.1:8000", 1, 0.1)] });
    model.apply(&Event { kind: "workers".to_owned(), data: hashed.to_string() }).unwrap();
    let frame = text_of(&model, &View::default(), 40, 24).unwrap();
    let head = frame.lines().find(|line| line.starts_with("WORKER")).unwrap();
    // O3.1
    assert_eq!(head.split_whitespace().collect::<Vec<_>>(), ["WORKER", "ROLE", "STATE"]);
    // O3.1
    assert!(frame.contains(" prefill    eligible"), "{frame}");
    let place = |address: &str| text(&model, &View::default()).find(address).unwrap();
    // O3.4: the names that are shown are sorted, and not the ids.
    assert!(place("10.0.0.1:8000") < place("10.0.0.9:8000"));
    for width in [40, 80] {
        let help = text_of(&model, &View { help: true, ..View::default() }, width, 40).unwrap();
        let help = help.replace(|c: char| !c.is_alphanumeric(), " ");
        let words: Vec<&str> = help.split_whitespace().collect();
        for word in ["clears", "cache", "KV", "TTFT"] {
            // O3.1
            assert!(words.contains(&word), "{width} {word}: {words:?}");
        }
    }
}

#[test]
fn a_lost_gateway_is_visible_and_names_cannot_escape() {
    let mut model = model();
    model.lost = Some(("12:00:01Z".to_owned(), "refused\u{1b}[2J".to_owned()));
    let frame = text(&model, &View { paused: Some(Box::new(model.clone())), ..View::default() });
    // O3.2
    assert!(frame.starts_with("pointsman 0.1.0 LOST the gateway since 12:00:01Z: refused�[2J"), "{frame}");
    model.workers[0].spec.url = "http://a\u{1b}]0;x\u{7}\u{9b}31m".to_owned();
    model.workers[0].spec.role = "pre\r\nfill".to_owned();
    model.slots[0].policy = "\u{202e}evil".to_owned();
    let frame = text(&model, &View::default());
    // O3.3
    assert!(!frame.chars().any(|c| c != '\n' && (c.is_control() || c == '\u{202e}')), "{frame:?}");
    assert!(frame.contains("�evil"), "{frame}");
}

#[test]
fn keys_sort_filter_pause_and_drain_only_after_a_confirmation() {
    let (model, mut view) = (model(), View::default());
    let type_in = |view: &mut View, keys: &str| {
        keys.chars().map(|key| handle_key(Key::Char(key), view, &model)).last().unwrap()
    };
    let ids = |view: &View| view.rows(&model).iter().map(|worker| worker.id).collect::<Vec<_>>();
    assert_eq!(ids(&view), [1, 2]);
    type_in(&mut view, "s");
    // O3.4
    assert_eq!((view.sort, ids(&view)), (Sort::Active, vec![2, 1]));
    type_in(&mut view, "/0.0.2:q\n");
    // O3.4
    assert_eq!((ids(&view), view.typing), (vec![], false));
    handle_key(Key::Esc, &mut view, &model);
    assert_eq!(ids(&view), [2, 1]);
    // O3.5
    assert_eq!(type_in(&mut view, "dn"), Action::None);
    handle_key(Key::Down, &mut view, &model);
    assert!(
        type_in(&mut view, "d") == Action::None && text(&model, &view).contains("drain worker 1? y confirms")
    );
    // O3.5
    assert_eq!(type_in(&mut view, "y"), Action::Change(Change { worker: 1, undo: false }));
    type_in(&mut view, "p");
    // O3.4
    assert!(text(&Model::default(), &view).contains("10.0.0.1:8000"));
    type_in(&mut view, "ph");
    assert!(view.paused.is_none() && text(&model, &view).contains("this help"));
    assert_eq!(type_in(&mut view, "q"), Action::Quit);
    assert_eq!(
        handle_key(Key::Ctrl('c'), &mut View { typing: true, ..View::default() }, &model),
        Action::Quit
    );
    let viewer = Model { may_change: false, ..model.clone() };
    let mut view = View::default();
    handle_key(Key::Char('d'), &mut view, &viewer);
    // O3.5
    assert_eq!(view.confirm, None);
}
