//! Asks an engine whether it is healthy, and whether an operator has paused it: requests to a paused engine
//! wait until it resumes.

use std::time::Duration;

use bytes::Bytes;

use super::{
    CHECK_URL, HEALTH, MAX_BODY, MAX_FACTS_BODY, Probe, client::Response, health::health_path, parse,
    speaks_tls,
};
use crate::{id::Engine, worker::Health};

/// SGLang's health check that generates a token, although `/health` may be set not to.
const GENERATES: &str = "/health_generate";

/// Returns where an engine says whether it is paused: vLLM with its endpoints for development, to which that
/// for the pause belongs.
pub(super) fn pause_path(engine: Engine) -> Option<&'static str> {
    (engine == Engine::Vllm).then_some("/is_paused")
}

impl Probe {
    /// Asks whether the engine is healthy, and whether it is paused.
    pub(super) async fn ask_health(&mut self) -> Response {
        let answer = self.health_at(self.health_path).await;
        if self.health_path == HEALTH {
            if matches!(answer, Response::Ok(_) | Response::Absent) {
                self.ask_whether_paused().await;
            }
            return answer;
        }
        match answer {
            Response::Ok(_) => _ = self.note_paused(false),
            Response::Absent => {
                self.health_path = HEALTH;
                self.note_paused(false);
                return self.health_at(HEALTH).await;
            }
            Response::Status(..) => return self.ask_engine_that_is_not_ready().await,
            _ => {}
        }
        answer
    }

    /// Asks a SGLang engine whose `/ready` says no. It is paused, or an earlier check of its health failed:
    /// then it says no until one passes. A paused engine does not generate, and answers questions.
    async fn ask_engine_that_is_not_ready(&mut self) -> Response {
        if self.worker.health() == Health::Healthy {
            self.note_paused(true);
        }
        let answer = match self.health_at(GENERATES).await {
            Response::Absent => self.health_at(HEALTH).await,
            answer => answer,
        };
        let answers = match &answer {
            Response::Ok(_) | Response::Absent => true,
            Response::TimedOut(_) | Response::Failed(_) | Response::Untrusted(_) => {
                let url = format!("{}/server_info", self.worker.spec().url);
                matches!(self.get_at(&url, MAX_FACTS_BODY).await, Response::Ok(_))
            }
            _ => false,
        };
        if !answers {
            // It gets no new request until the next check decides whether it is paused, unhealthy or neither.
            return answer;
        }
        let path = health_path(self.worker.spec().engine);
        let ready = self.health_at(path).await;
        self.note_paused(!matches!(ready, Response::Ok(_)));
        Response::Ok(Bytes::new())
    }

    /// The engine was too busy to answer a check. One that is not ready and works on requests is not paused.
    pub(super) fn excused(&mut self) {
        self.checks.excused();
        if self.health_path != HEALTH {
            self.note_paused(false);
        }
    }

    /// Asks an engine without `/health` for its models. The URL of one that has neither is wrong, or leads to
    /// a proxy that lost its route. A plain OpenAI server may have neither.
    pub(super) async fn ask_without_health(&self) -> Response {
        if self.worker.spec().engine == Engine::Openai {
            return Response::Absent;
        }
        match self.get("/v1/models").await {
            Response::Absent => {
                let url = &self.worker.spec().url;
                Response::Failed(format!("{url} answers 404 to /health and /v1/models: {CHECK_URL}"))
            }
            _ => Response::Absent,
        }
    }

    /// Asks a vLLM engine whether it is paused. One that cannot be asked is not; one that does not answer now
    /// is what it was.
    async fn ask_whether_paused(&mut self) {
        let Some(path) = self.pause_path else { return };
        match self.get(path).await {
            Response::Ok(body) => {
                let paused = parse::holds("is_paused", &body);
                if self.note_paused(paused) && paused {
                    // It drops its cache, unless the operator says otherwise.
                    self.index.forget_records(self.worker.id());
                }
            }
            Response::Absent => {
                self.pause_path = None;
                self.note_paused(false);
            }
            Response::Status(..) => _ = self.note_paused(false),
            _ => {}
        }
    }

    /// Notes whether the engine is paused. Returns whether that changed.
    fn note_paused(&self, paused: bool) -> bool {
        let changed = self.worker.set_engine_paused(paused);
        if changed {
            self.log(if paused { "engine_paused" } else { "engine_resumed" }, "");
        }
        changed
    }

    async fn health_at(&mut self, path: &str) -> Response {
        let config = *self.config.borrow();
        let url = format!("{}{path}", self.worker.spec().url);
        let is_slow = path == HEALTH || path == GENERATES;
        let limit: Duration = if is_slow { self.checks.limit(&config) } else { config.timeout };
        let (answer, took, connection) = self.send(&url, MAX_BODY, limit).await;
        self.reconnected |= connection.is_some_and(|local| self.connection.is_replaced(local));
        if is_slow && matches!(answer, Response::Ok(_) | Response::Absent) {
            self.checks.took(took, &config);
        }
        self.or_speaks_tls(&url, answer).await
    }

    /// Replaces the answer of an engine that speaks TLS although its URL has none. That is asked once in a
    /// row of failures: `probe.max_per_second` does not count it.
    pub(super) async fn or_speaks_tls(&mut self, url: &str, answer: Response) -> Response {
        if matches!(answer, Response::Ok(_) | Response::Absent | Response::Refused(_)) {
            // It answers without TLS, or ended: the next process may speak it.
            self.speaks_tls = None;
        } else if answer.may_need_tls() {
            let speaks_tls = match self.speaks_tls {
                Some(known) => known,
                None => {
                    let _turn = self.turns.acquire().await;
                    self.client.needs_tls(url).await
                }
            };
            self.speaks_tls = Some(speaks_tls);
            if speaks_tls {
                return Response::Untrusted(format!("GET {url}: {}", speaks_tls::PROBLEM));
            }
        }
        answer
    }
}
