//! The load of answers that are not streamed: nothing tells their progress, so it is estimated.

use std::time::Duration;

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{COMPLETIONS, TestCluster, TestClusterBuilder};
use pointsman_workers::DpRank;
use tokio::{task::JoinSet, time::sleep};

const MS: Duration = Duration::from_millis(1);

fn engine() -> SimConfig {
    SimConfig {
        overhead: 20 * MS,
        prefill_per_token: Duration::from_micros(100),
        itl: 10 * MS,
        load_factor: 1.0,
        jitter: 0.05,
        max_batched_tokens: 16_384,
        blocks: 100_000,
        max_num_seqs: 256,
        ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
    }
}

/// A prompt of token ids that shares no prefix with another one, and an answer of this many tokens.
fn body(seed: u32, prompt: u32, output: u32, stream: bool) -> String {
    let ids: Vec<u32> = (0..prompt).map(|at| (seed * 7_919 + at * 31) % 30_000 + 5).collect();
    format!(
        r#"{{"model":"tiny","prompt":{ids:?},"max_tokens":{output},"ignore_eos":true,"stream":{stream},"stream_options":{}}}"#,
        if stream { "{\"include_usage\":true}" } else { "null" }
    )
}

#[tokio::test]
async fn f4_the_prefill_of_a_whole_answer_ends_and_its_blocks_grow_while_it_is_generated() {
    let builder = TestClusterBuilder::new().config(|config| {
        let most = pointsman_routing::BusyThresholds { prefill_tokens: Some(1_000), ..Default::default() };
        config.routing.busy = [(pointsman_workers::Leg::Aggregated, most)].into();
    });
    let cluster = builder.sim_with(engine(), "").start().await;
    let worker = cluster.worker(1);
    let load = || {
        let load = worker.load(DpRank(0)).unwrap();
        (load.active_prefill_tokens(), load.decode_blocks())
    };
    let client = cluster.client.clone();
    let answer = cluster
        .gateway
        .state()
        .tracker
        .spawn(async move { client.post(COMPLETIONS, &[], body(1, 1_600, 300, false)).await.unwrap() });
    cluster.until("it is booked", |_| load() == (1_600, 100)).await.unwrap();
    // F4.10
    cluster.until("its prefill ended", |_| load().0 == 0).await.unwrap();
    assert!(!answer.is_finished());
    let next = cluster.client.post(COMPLETIONS, &[], body(2, 16, 1, false)).await.unwrap();
    assert_eq!(next.status, 200, "it is not busy");
    cluster.until("its output grows", |_| load().1 >= 110).await.unwrap();
    assert!(!answer.is_finished());
    assert_eq!(answer.await.unwrap().json().unwrap()["usage"]["completion_tokens"], 300);
    cluster.at_rest().await.unwrap();
    assert_eq!(load(), (0, 0));
    let errors = cluster.metric("pointsman_whole_estimate_error_ratio_count").await.unwrap();
    assert_eq!(errors, [2.0]);
}

/// The upper ends of the histogram of errors; the last bucket has none.
const ENDS: [f64; 10] = [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0];

/// How many estimates were wrong by at most each of [`ENDS`], and how many there were.
async fn errors(cluster: &TestCluster) -> Vec<f64> {
    cluster.metric("pointsman_whole_estimate_error_ratio_bucket").await.unwrap()
}

/// A quantile of a histogram, interpolated within its bucket.
fn quantile(counts: &[f64], share: f64) -> f64 {
    let wanted = counts[ENDS.len()] * share;
    let at = counts.iter().position(|count| *count >= wanted).unwrap().min(ENDS.len() - 1);
    let (from, before) = if at == 0 { (0.0, 0.0) } else { (ENDS[at - 1], counts[at - 1]) };
    from + (ENDS[at] - from) * ((wanted - before) / (counts[at] - before).max(1.0)).min(1.0)
}

#[tokio::test]
async fn f4_booked_load_of_whole_answers_is_within_a_fifth_of_the_true_load() {
    let cluster = TestClusterBuilder::new().sim_with(engine(), "").start().await;
    let worker = cluster.worker(1);
    let mut clients = JoinSet::new();
    for client in 0..12_u32 {
        let http = cluster.client.clone();
        clients.spawn(async move {
            let mut random = client;
            for turn in 0..1_000 {
                // As many short lengths as long ones.
                let mut length = |from: f64, to: f64| {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let share = f64::from(random >> 8) / f64::from(1 << 24);
                    (from.ln() + (to / from).ln() * share).exp() as u32
                };
                let (prompt, output) = (length(32.0, 3_000.0), length(4.0, 150.0));
                let body = body(client * 1_000 + turn, prompt, output, false);
                assert_eq!(http.post(COMPLETIONS, &[], body).await.unwrap().status, 200);
            }
        });
    }
    // Some answers are measured first.
    sleep(Duration::from_secs(4)).await;
    let cold = errors(&cluster).await;
    let (mut booked, mut held) = (0.0, 0.0);
    for _ in 0..250 {
        sleep(20 * MS).await;
        booked += f64::from(worker.load(DpRank(0)).unwrap().decode_blocks());
        held += f64::from(cluster.sims[0].state().used_blocks);
    }
    clients.shutdown().await;
    println!("booked {:.0} blocks, held {:.0}", booked / 250.0, held / 250.0);
    let warm: Vec<f64> = errors(&cluster).await.iter().zip(cold).map(|(all, cold)| all - cold).collect();
    println!(
        "error of {} estimates: p50 {:.2}, p90 {:.2}",
        warm[10],
        quantile(&warm, 0.5),
        quantile(&warm, 0.9)
    );
    // F4.10
    assert!((booked / held - 1.0).abs() < 0.2, "booked {booked} held {held}");
    cluster.at_rest().await.unwrap();
}
