//! Models without a source of tokens whose workers have KV events: events name tokens, so that they say
//! nothing about prompts of text.

use std::collections::HashSet;

use parking_lot::RwLock;
use pointsman_workers::{ModelName, Snapshot};

/// Maximum number of models that are warned of.
const MAX_MODELS: usize = 100;

/// The models that were warned of.
#[derive(Debug, Default)]
pub(super) struct MissingTokenizers(RwLock<HashSet<ModelName>>);

impl MissingTokenizers {
    /// Returns whether the workers of a model have KV events. Only the first worker of each role is looked
    /// at, because a model may have thousands.
    pub(super) fn has_events(model: &ModelName, workers: &Snapshot) -> bool {
        let mut first = workers.pools(model).into_iter().filter_map(|pool| pool.first());
        first.any(|candidate| candidate.worker.spec().kv_events.is_some())
    }

    /// Returns whether the workers of a model that has no source of tokens have KV events, and warns of the
    /// first such request.
    pub(super) fn concerns(&self, model: &ModelName, workers: &Snapshot) -> bool {
        if !Self::has_events(model, workers) {
            return false;
        }
        let may_warn = {
            let warned = self.0.read();
            warned.len() < MAX_MODELS && !warned.contains(model)
        };
        if may_warn {
            self.warn(model);
        }
        true
    }

    fn warn(&self, model: &ModelName) {
        if self.0.write().insert(model.clone()) {
            tracing::warn!(
                %model,
                "prompts of text do not use kv events, which name tokens: set models.NAME.tokenizer"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read as _, sync::Arc};

    use pointsman_workers::{Registry, WorkerSpec};

    use super::*;

    #[test]
    fn h7_a_model_with_events_and_without_a_tokenizer_is_warned_of_once() {
        let (mut read, written) = std::io::pipe().unwrap();
        let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(Arc::new(written)).finish();
        let lines = tracing::subscriber::set_default(lines);
        let registry = Registry::default();
        for (model, events) in [("a", ",kv_events=tcp://127.0.0.1:9"), ("b", "")] {
            let flag = format!("role=aggregated,engine=vllm,url=http://{model}:1,model={model}{events}");
            registry.upsert(WorkerSpec::parse_flag(&flag).unwrap());
        }
        let (missing, workers) = (MissingTokenizers::default(), registry.snapshot());
        let concerns = ["a", "a", "b", "c"].map(|model| missing.concerns(&ModelName::new(model), &workers));
        // H7.12
        assert_eq!(concerns, [true, true, false, false]);
        drop(lines);
        let mut log = String::new();
        read.read_to_string(&mut log).unwrap();
        assert_eq!(log.matches("models.NAME.tokenizer").count(), 1, "{log}");
        assert!(log.contains("model=a"), "{log}");
    }
}
