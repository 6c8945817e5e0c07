//! The share of the queue for requests that wait for workers, and the parts of models and tenants of it.

use std::time::Duration;

use pointsman_gateway::config::{Config, Model};
use pointsman_sim::SimConfig;
use serde_json::json;
use tokio::time::Instant;

use super::{CHAT, aggregated, ask, chat, empty, join, seen, until_waiting};

#[tokio::test]
async fn f7_a_model_without_workers_takes_half_of_the_queue_and_delays_no_other() {
    let cluster = empty(|_| {}).await;
    let slow = SimConfig { model: "other".to_owned(), overhead: Duration::from_millis(500), ..aggregated() };
    let _other = join(&cluster, 1, slow, json!({"max_concurrency": 1})).await;
    cluster.until_counted("pointsman_worker_eligible{", 1.0).await.unwrap();
    let other = async || ask(&cluster, json!({"model": "other"})).await.status.as_u16();
    let others = async {
        until_waiting(&cluster, 4.0).await;
        let fifth = ask(&cluster, json!({})).await;
        // F7.11
        assert_eq!(seen(&fifth), (503, "no_worker".to_owned(), "10"), "{fifth:?}");
        let text = fifth.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
        assert!(text.contains("of half of queue.limit"), "{text}");
        let begun = Instant::now();
        // F7.11: four places are left
        let all = tokio::join!(other(), other(), other(), other(), other());
        assert_eq!(all, (200, 200, 200, 200, 200));
        // F7.11: nor does it wait for a turn of those
        assert!(begun.elapsed() < Duration::from_millis(5 * 500 + 1_500), "{:?}", begun.elapsed());
        join(&cluster, 2, aggregated(), json!({})).await
    };
    let tiny = async || ask(&cluster, json!({})).await.status.as_u16();
    let (one, two, three, four, _sim) = tokio::join!(tiny(), tiny(), tiny(), tiny(), others);
    assert_eq!([one, two, three, four], [200; 4]);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f7_one_model_without_workers_leaves_places_to_another_one() {
    let two = |config: &mut Config| {
        let wait_for_workers = Some(Duration::from_secs(60));
        config.models.insert("other".to_owned(), Model { wait_for_workers, ..Model::default() });
    };
    let cluster = empty(two).await;
    let tiny = async || ask(&cluster, json!({})).await.status.as_u16();
    let joins = async {
        until_waiting(&cluster, 2.0).await;
        let third = ask(&cluster, json!({})).await;
        // F7.11: two of the four places
        assert_eq!(seen(&third), (503, "no_worker".to_owned(), "10"), "{third:?}");
        let other = async {
            until_waiting(&cluster, 2.0).await;
            let both = SimConfig { model: "other".to_owned(), ..aggregated() };
            tokio::join!(join(&cluster, 1, aggregated(), json!({})), join(&cluster, 2, both, json!({})))
        };
        let (reply, sims) = tokio::join!(ask(&cluster, json!({"model": "other"})), other);
        // F7.11
        assert_eq!(reply.status, 200, "{reply:?}");
        sims
    };
    let (one, two, _sims) = tokio::join!(tiny(), tiny(), joins);
    assert_eq!((one, two), (200, 200));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f7_a_tenant_with_many_waits_for_workers_leaves_places_to_another_one() {
    const TENANT: &str = "x-tenant";
    let tenants = |config: &mut Config| {
        config.server.tenant_header = TENANT.to_owned();
        config.auth.trusted_proxies = vec!["127.0.0.0/8".to_owned()];
    };
    let cluster = empty(tenants).await;
    let asks = async |tenant| {
        let reply = cluster.client.post(CHAT, &[(TENANT, tenant)], chat(json!({}))).await.unwrap();
        (reply.status.as_u16(), reply.code(), super::retry_after(&reply).to_owned())
    };
    let served = (200, String::new(), String::new());
    let refused = (503, "no_worker".to_owned(), "10".to_owned());
    let flood = async { tokio::join!(asks("a"), asks("a"), asks("a"), asks("a")) };
    let others = async {
        until_waiting(&cluster, 4.0).await;
        // F7.11: not for one of its own
        assert_eq!(asks("a").await, refused);
        let two = async { tokio::join!(asks("b"), asks("b")) };
        let joins = async {
            cluster.until_counted("pointsman_requests_total{", 3.0).await.unwrap();
            until_waiting(&cluster, 4.0).await;
            // F7.11: both have half
            assert_eq!([asks("b").await, asks("a").await], [refused.clone(), refused.clone()]);
            join(&cluster, 1, aggregated(), json!({})).await
        };
        tokio::join!(two, joins)
    };
    let ((one, two, three, four), (b, _sim)) = tokio::join!(flood, others);
    let a = [one, two, three, four];
    let of_a = |outcome| a.iter().filter(|seen| **seen == outcome).count();
    // F7.11
    assert_eq!((b.0, b.1, of_a(served.clone()), of_a(refused)), (served.clone(), served, 2, 2), "{a:?}");
    cluster.at_rest().await.unwrap();
}
