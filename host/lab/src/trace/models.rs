//! The models of a trace's requests.

use std::collections::{BTreeMap, HashSet};

use pointsman_cli::escaped;

use super::Trace;

/// Maximum number of models that a message lists.
const LISTED: usize = 8;

impl Trace {
    /// Keeps the requests of one model.
    ///
    /// # Errors
    /// The trace has no such request; the message lists its models.
    pub(crate) fn of_model(mut self, model: &str) -> Result<Self, String> {
        let has = self.models();
        self.requests.retain(|request| request.model.as_deref() == Some(model));
        if self.requests.is_empty() {
            let has = has.unwrap_or_else(|| "no request with a model".to_owned());
            return Err(format!("--model {model}: {} has {has}", self.name));
        }
        self.remove_lost_parents();
        self.sort();
        Ok(self)
    }

    /// Makes sessions of forks whose parent has no request before them any more. They begin at their own
    /// time.
    pub(super) fn remove_lost_parents(&mut self) {
        let mut sessions = HashSet::new();
        for request in &mut self.requests {
            request.parent = request.parent.take().filter(|parent| sessions.contains(parent));
            sessions.extend(request.session.clone());
        }
    }

    /// Notes that the trace has several models, which a simulation does not tell apart.
    pub(crate) fn note_models(&mut self) {
        let mut models = self.requests.iter().filter_map(|request| request.model.as_ref());
        let first = models.next();
        if models.any(|model| Some(model) != first) {
            let models = self.models().unwrap_or_default();
            self.notes.push(format!(
                "the trace has {models}; they are simulated as one model on all engines: --model selects one"
            ));
        }
    }

    /// Lists the models with their numbers of requests, those with the most requests first. Returns `None` if
    /// no request has a model.
    fn models(&self) -> Option<String> {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for model in self.requests.iter().filter_map(|request| request.model.as_deref()) {
            *counts.entry(model).or_default() += 1;
        }
        let mut counts: Vec<(&str, usize)> = counts.into_iter().collect();
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        let shown = |(model, count): &(&str, usize)| format!("{} ({count} requests)", escaped(model));
        let mut listed: Vec<String> = counts.iter().take(LISTED).map(shown).collect();
        if counts.len() > LISTED {
            listed.push(format!("{} more", counts.len() - LISTED));
        }
        let noun = if counts.len() == 1 { "model" } else { "models" };
        (!counts.is_empty()).then(|| format!("the {noun} {}", listed.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::TraceRequest;

    fn request(session: &str, parent: Option<&str>, model: Option<&str>) -> TraceRequest {
        TraceRequest {
            session: Some(session.to_owned()),
            parent: parent.map(str::to_owned),
            model: model.map(str::to_owned),
            ..TraceRequest::default()
        }
    }

    fn trace(requests: Vec<TraceRequest>) -> Trace {
        Trace { name: "t".to_owned(), requests, ..Trace::default() }
    }

    #[test]
    fn several_models_are_noted_and_one_can_be_selected() {
        let requests = || {
            vec![
                request("1", None, Some("b")),
                request("2", Some("1"), Some("a\u{1b}")),
                request("3", Some("2"), Some("a\u{1b}")),
                request("4", None, None),
            ]
        };
        let mut both = trace(requests());
        both.note_models();
        let models = "the models a\\u{1b} (2 requests), b (1 requests)";
        let note = format!(
            "the trace has {models}; they are simulated as one model on all engines: --model selects one"
        );
        assert_eq!(both.notes, [note]);
        let mut one = trace(requests()).of_model("a\u{1b}").unwrap();
        one.note_models();
        assert!(one.notes.is_empty(), "{:?}", one.notes);
        let parents: Vec<Option<&str>> = one.requests.iter().map(|one| one.parent.as_deref()).collect();
        assert_eq!(parents, [None, Some("2")]);
        assert_eq!(trace(requests()).of_model("c").unwrap_err(), format!("--model c: t has {models}"));
        let without = trace(vec![request("4", None, None)]).of_model("c").unwrap_err();
        assert_eq!(without, "--model c: t has no request with a model");
        let many = (0..10).map(|number| request("1", None, Some(&number.to_string())));
        let mut many = trace(many.collect());
        many.note_models();
        assert!(many.notes[0].contains("7 (1 requests), 2 more; they are"), "{:?}", many.notes);
    }
}
