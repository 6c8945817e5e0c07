//! One leg of one dialect: a worker that misbehaves, a healthy worker of the same role, and the worker of the
//! other leg.

use std::{path::Path, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::Method;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use super::{
    cases::{Case, Expected, SMUGGLED},
    proxy::Proxy,
};
use crate::{
    client::{CHAT, Client, Outcome, judge},
    fleet::{EngineSpec, Fleet, Process},
};

/// Number of requests of one row; half of them are streamed.
const REQUESTS: u64 = 8;
/// Number of concurrent requests.
const AT_ONCE: usize = 4;
/// Maximum number of batches until a case has applied to at least one request.
const BATCHES: u32 = 4;
/// Time after which a request counts as hanging.
const HANG: Duration = Duration::from_secs(20);
/// Maximum time until a worker that behaves again serves requests.
const RECOVERY: Duration = Duration::from_secs(25);

/// The engines that serve one model.
pub(super) struct Group {
    /// Leg and dialect, for the table.
    pub(super) name: &'static str,
    dialect: &'static str,
    /// Role of the worker that misbehaves.
    role: &'static str,
    model: String,
    proxy: Proxy,
    proxied_id: u64,
    /// The healthy worker of the same role.
    healthy: Process,
    healthy_id: u64,
    _others: Vec<Process>,
    /// `--worker` flags of all engines of the group.
    pub(super) workers: Vec<String>,
}

/// Result of one case on one leg.
#[derive(Clone, Debug, Default)]
pub(super) struct Row {
    pub(super) requests: u64,
    /// Number of requests to which the case applied.
    pub(super) hits: u64,
    pub(super) errors: u64,
    pub(super) errors_allowed: u64,
    /// Answers that are neither whole nor one valid error, or carry bytes of another answer.
    pub(super) desyncs: Vec<String>,
    /// Time until the worker served again; `None` if it did not.
    pub(super) recovery: Option<Duration>,
}

/// Returns the settings of an engine of a model.
fn spec(dialect: &str, role: &str, model: &str) -> EngineSpec {
    let flags = "--overhead-ms 2 --prefill-ms-per-token 0.01 --itl-ms 2 --lease-s 3 --room-wait-s 5";
    EngineSpec::new(dialect, role, &format!("--model {model} {flags}"))
}

impl Group {
    /// Starts the engines of a group; `number` makes names and ids unique.
    pub(super) async fn start(
        bin: &Path,
        dir: &Path,
        number: usize,
        name: &'static str,
        [dialect, role]: [&'static str; 2],
    ) -> anyhow::Result<Self> {
        let (model, id) = (format!("model-{number}"), number * 10);
        let own = spec(dialect, role, &model);
        let (bad, healthy) = (own.start(bin, dir, id + 1)?, own.start(bin, dir, id + 2)?);
        let proxy = Proxy::start(&bad.listening()).await?;
        let mut announced = bad.announced.clone();
        announced["listening"] = proxy.address.to_string().into();
        let mut workers =
            vec![own.worker_flag(id + 1, &announced), own.worker_flag(id + 2, &healthy.announced)];
        let mut others = vec![bad];
        let other = [("prefill", "decode"), ("decode", "prefill")].into_iter().find(|(one, _)| *one == role);
        if let Some((_, other)) = other {
            let spec = spec(dialect, other, &model);
            let process = spec.start(bin, dir, id + 3)?;
            workers.push(spec.worker_flag(id + 3, &process.announced));
            others.push(process);
        }
        let (proxied_id, healthy_id) = (id as u64 + 1, id as u64 + 2);
        let _others = others;
        Ok(Self { name, dialect, role, model, proxy, proxied_id, healthy, healthy_id, _others, workers })
    }

    /// Starts the healthy worker again on its address, with a model.
    fn restart(&mut self, bin: &Path, dir: &Path, model: &str) -> anyhow::Result<()> {
        let (listen, place) = (self.healthy.listening(), usize::try_from(self.healthy_id)?);
        self.healthy.stop();
        self.healthy = spec(self.dialect, self.role, model).start_at(bin, dir, place, &listen)?;
        Ok(())
    }

    /// Whether a case is possible on this leg.
    pub(super) fn has(&self, case: &Case) -> bool {
        !case.target.contains("abort") || self.dialect == "sglang"
    }

    /// Runs one case: sends requests while the worker misbehaves, and then until it serves again.
    pub(super) async fn run(&self, fleet: &Fleet, case: &Case, turn: u64) -> anyhow::Result<Row> {
        let mut row = Row::default();
        let before = self.proxy.hits();
        self.proxy.misbehave(Some(case.clone()));
        for batch in 0..BATCHES {
            self.requests(fleet, turn * 1_000 + u64::from(batch) * 100, &mut row).await;
            row.hits = self.proxy.hits() - before;
            if row.hits > 0 || !case.target.starts_with("post /v1/") {
                break;
            }
        }
        self.proxy.misbehave(None);
        row.errors_allowed = match case.expected {
            Expected::Served => 0,
            Expected::OneError | Expected::StreamError => row.hits,
        };
        row.recovery = self.recovery(fleet, self.proxied_id).await?;
        Ok(row)
    }

    /// Stops the healthy worker's process with SIGSTOP while requests wait for it, and continues it later.
    pub(super) async fn run_stopped(&self, fleet: &Fleet) -> anyhow::Result<Row> {
        let mut row = Row::default();
        self.healthy.signal("-STOP");
        self.requests(fleet, 900_000, &mut row).await;
        self.healthy.signal("-CONT");
        row.recovery = self.recovery(fleet, self.healthy_id).await?;
        Ok(row)
    }

    /// Kills the healthy worker's process under load and starts it again on the same address.
    pub(super) async fn run_killed(&mut self, fleet: &Fleet, bin: &Path, dir: &Path) -> anyhow::Result<Row> {
        let mut row = Row::default();
        let kill = async {
            sleep(Duration::from_millis(10)).await;
            self.healthy.signal("-KILL");
        };
        tokio::join!(self.requests(fleet, 910_000, &mut row), kill);
        // Streams that have begun end with an error.
        row.errors_allowed = AT_ONCE as u64;
        self.healthy.stop();
        // The bootstrap port of an SGLang prefill engine would change, but the worker's description contains
        // it.
        if (self.dialect, self.role) == ("sglang", "prefill") {
            row.recovery = Some(Duration::ZERO);
            return Ok(row);
        }
        self.restart(bin, dir, &self.model.clone())?;
        row.recovery = self.recovery(fleet, self.healthy_id).await?;
        Ok(row)
    }

    /// Restarts the healthy worker with another model, and then with its own. The time of recovery is the
    /// longer of the two times until the gateway lists the right models.
    pub(super) async fn run_other_model(
        &mut self,
        fleet: &Fleet,
        bin: &Path,
        dir: &Path,
    ) -> anyhow::Result<Row> {
        let mut row = Row::default();
        let mut longest = Some(Duration::ZERO);
        for model in [format!("{}-other", self.model), self.model.clone()] {
            self.restart(bin, dir, &model)?;
            let started = Instant::now();
            let is_other = model != self.model;
            let mut found = false;
            while !found && started.elapsed() < RECOVERY {
                let list = fleet.client.get("/v1/models").await?;
                found = list.contains(&format!("\"{}-other\"", self.model)) == is_other;
                sleep(Duration::from_millis(50)).await;
            }
            longest = longest.max(Some(started.elapsed())).filter(|_| found);
            self.requests(fleet, 920_000 + u64::from(is_other), &mut row).await;
        }
        row.recovery = longest;
        Ok(row)
    }

    async fn requests(&self, fleet: &Fleet, turn: u64, row: &mut Row) {
        let outcomes: Vec<Outcome> = stream::iter(turn..turn + REQUESTS)
            .map(|turn| self.request(&fleet.client, turn))
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        row.requests += REQUESTS;
        for outcome in outcomes {
            match outcome {
                Outcome::Whole | Outcome::Streamed => {}
                Outcome::OneError => row.errors += 1,
                Outcome::Neither(problem) => row.desyncs.push(problem.chars().take(200).collect()),
            }
        }
    }

    /// Returns the body of a distinct request. `pin` names the worker that has to serve it.
    fn body(&self, turn: u64, streams: bool, pin: Option<u64>) -> String {
        let key = match self.role {
            "prefill" => "prefill_worker_id",
            "decode" => "decode_worker_id",
            _ => "backend_instance_id",
        };
        let mut body = json!({
            "model": self.model, "stream": streams, "max_tokens": 6, "ignore_eos": true,
            "messages": [{ "role": "user", "content": format!("request {turn} ").repeat(20) }],
        });
        if let Some(pin) = pin {
            body["nvext"] = json!({ key: pin });
        }
        body.to_string()
    }

    async fn request(&self, client: &Client, turn: u64) -> Outcome {
        let streams = turn.is_multiple_of(2);
        let answer = exchange(client, self.body(turn, streams, None));
        match timeout(HANG, answer).await {
            Err(_) => Outcome::Neither(format!("no answer within {HANG:?}")),
            Ok(Err(error)) => Outcome::Neither(format!("{error:#}")),
            Ok(Ok((_, text))) if text.contains(SMUGGLED) => Outcome::Neither(text),
            Ok(Ok((success, text))) => judge(success, &normal(&text), streams),
        }
    }

    /// Returns the time until a worker serves a request that is pinned to it.
    async fn recovery(&self, fleet: &Fleet, worker: u64) -> anyhow::Result<Option<Duration>> {
        let started = Instant::now();
        let mut turn = 990_000;
        while started.elapsed() < RECOVERY {
            // A request that is pinned to an ineligible decode worker would leave blocks of its prefill
            // behind.
            if !is_eligible(&fleet.admin.json("/workers").await?, worker) {
                sleep(Duration::from_millis(50)).await;
                continue;
            }
            turn += 1;
            let body = self.body(worker * 1_000_000 + turn, false, Some(worker));
            let answer = timeout(HANG, exchange(&fleet.client, body)).await;
            if matches!(answer, Ok(Ok((true, _)))) {
                return Ok(Some(started.elapsed()));
            }
            sleep(Duration::from_millis(50)).await;
        }
        Ok(None)
    }
}

/// Sends a request. Returns whether its status is a success, and the whole text of the answer.
async fn exchange(client: &Client, body: String) -> anyhow::Result<(bool, String)> {
    let (parts, body) = client.send(Method::POST, CHAT, &[], Bytes::from(body)).await?.into_parts();
    let text = body.collect().await?.to_bytes();
    Ok((parts.status.is_success(), String::from_utf8_lossy(&text).into_owned()))
}

/// Returns the events of a stream with LF only, and without the fields that the verdict does not check.
fn normal(text: &str) -> String {
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    let is_known = |line: &&str| !["event:", "id:", "retry:"].iter().any(|field| line.starts_with(field));
    let text: String = text.split_inclusive('\n').filter(is_known).collect();
    text
}

fn is_eligible(workers: &Value, id: u64) -> bool {
    let mut workers = workers["workers"].as_array().into_iter().flatten();
    workers.any(|worker| worker["id"] == id && worker["ineligible"].is_null())
}

#[cfg(test)]
mod tests {
    use super::normal;

    #[test]
    fn streams_are_compared_without_the_fields_that_clients_ignore() {
        assert_eq!(normal("event: x\r\nid: 1\r\ndata: {}\r\n\r\n"), "data: {}\n\n");
        assert_eq!(normal("data: {}\r\rdata: [DONE]\r\r"), "data: {}\n\ndata: [DONE]\n\n");
        assert_eq!(normal("{\"a\":1}"), "{\"a\":1}");
    }
}
