//! State of an engine's process by its metrics: load, progress, sleep, and whether it is the same process as
//! before. The gateway's knowledge of a process ends with the process.

use super::{
    MAX_LOAD_FAILURES, Probe, Response,
    figures::{Figures, figures},
    loads::{LOADS, figures_of_loads},
    parse,
};
use crate::id::{DpRank, Engine};

/// Returns the path of an engine's metrics.
pub(super) fn metrics_path(engine: Engine) -> Option<&'static str> {
    match engine {
        Engine::Vllm | Engine::Sglang => Some("/metrics"),
        Engine::Trtllm => Some("/prometheus/metrics"),
        Engine::Openai => None,
    }
}

/// Returns where else an engine tells its load, if it does not at `path`.
fn path_after(path: &str, engine: Engine) -> Option<&'static str> {
    (engine == Engine::Sglang && path != LOADS).then_some(LOADS)
}

/// Returns where an engine says whether it sleeps, if its metrics do not or say that it is awake again: vLLM
/// with its endpoints for development, to which that for sleep belongs.
pub(super) fn sleep_path(engine: Engine) -> Option<&'static str> {
    (engine == Engine::Vllm).then_some("/is_sleeping")
}

impl Probe {
    /// Reads the load figures. Figures that could not be read several times in a row are forgotten: an old
    /// figure must not keep a worker busy.
    pub(super) async fn read_load(&mut self) {
        let (path, answer) = loop {
            let Some(path) = self.load_path else {
                self.worker.note_signs(None);
                self.worker.set_engine_load(None);
                self.worker.set_reports_load(false);
                if let Some(path) = metrics_path(self.worker.spec().engine) {
                    self.note_reported(path, [false; 3]);
                }
                return;
            };
            match self.get(path).await {
                Response::Absent => self.load_path = path_after(path, self.worker.spec().engine),
                answer => break (path, answer),
            }
        };
        let read = answer.body().ok().flatten().and_then(|body| match path {
            LOADS => figures_of_loads(&body),
            _ => Some(figures(&body)),
        });
        if let Some(mut figures) = read {
            self.confirm_awake(&mut figures).await;
            self.observe(figures.clone());
            if figures.whole.has_load() {
                self.load_failures = 0;
                self.note_reported(path, figures.whole.known());
                return self.store_load(&figures);
            }
        }
        self.note_reported(path, [false; 3]);
        self.load_failures += 1;
        if self.load_failures >= MAX_LOAD_FAILURES {
            self.worker.note_signs(None);
            self.worker.set_engine_load(None);
            self.worker.set_reports_load(false);
        }
    }

    /// Asks an engine whether it sleeps, if its metrics do not tell, or say that it is awake although it was
    /// asleep or is not known yet. If it was woken in part, for example without its KV cache, its metrics say
    /// awake, and it cannot serve.
    pub(super) async fn confirm_awake(&mut self, figures: &mut Figures) {
        let is_known = |earlier: &Figures| earlier.asleep.is_some() && !figures.of_another_process(earlier);
        let is_sure = match figures.asleep {
            None => false,
            Some(true) => true,
            Some(false) => !self.worker.is_asleep() && self.figures.as_ref().is_some_and(is_known),
        };
        if !is_sure {
            figures.asleep = self.ask_whether_asleep().await;
        }
    }

    /// Asks an engine whether it sleeps; `None`: it did not answer now. One that cannot be asked is awake.
    async fn ask_whether_asleep(&mut self) -> Option<bool> {
        let Some(path) = self.sleep_path else { return Some(false) };
        match self.get(path).await {
            Response::Ok(body) => {
                self.worker.note_sleep_mode();
                Some(parse::holds("is_sleeping", &body))
            }
            Response::Absent => {
                self.sleep_path = None;
                Some(false)
            }
            _ => None,
        }
    }

    /// Notes what the metrics say of the process, apart from its load.
    pub(super) fn observe(&mut self, figures: Figures) {
        let (signs, asleep) = (figures.signs(), figures.asleep);
        let is_another = self.figures.as_ref().is_some_and(|earlier| figures.of_another_process(earlier));
        self.figures = Some(figures);
        if is_another {
            self.process_ended("another start");
            self.worker.note_restart();
        }
        self.worker.note_signs(signs);
        if let Some(asleep) = asleep
            && self.worker.set_asleep(asleep)
        {
            self.log(if asleep { "asleep" } else { "awake" }, "");
            if asleep {
                self.forget_cache();
            }
        }
    }

    /// Forgets what the engine has cached, also what its events reported: one that falls asleep drops its
    /// cache, and reports it only with its next step.
    fn forget_cache(&self) {
        let worker = self.worker.id();
        self.index.forget_records(worker);
        (0..self.worker.spec().dp_size).for_each(|rank| self.index.forget(worker, DpRank(rank)));
    }

    /// Forgets the state of the engine's process: its load, and its assumed cache.
    /// Blocks that its events report end with the connection of the events.
    pub(super) fn process_ended(&self, why: &str) {
        self.log("restarted", why);
        self.forget_process();
    }

    /// No process listens: the one that did has ended.
    pub(super) fn process_gone(&mut self) {
        if self.worker.was_cut() {
            // It ended within an answer: this check, which is not the first sign, counts.
            self.checks.gone(&self.worker);
        }
        if self.figures.take().is_some() {
            self.log("ended", "connection refused");
        }
        self.forget_process();
    }

    fn forget_process(&self) {
        self.index.forget_records(self.worker.id());
        self.worker.set_engine_load(None);
        self.worker.activity().forget();
        self.worker.note_new_process();
    }
}
