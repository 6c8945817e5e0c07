//! Parses the models that an engine lists. No I/O.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// Models of one engine that count. Those that it lists after them are left out.
pub(super) const MAX_MODELS: usize = 10_000;

/// Models that an engine lists, and their owner, which names the engine.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Models {
    pub(super) names: Vec<String>,
    /// Those of the names that are adapters of a model, with this, their parent.
    pub(super) adapters: Vec<(String, String)>,
    /// Those of the names that the engine says are no adapters. Some engines do not say what is one.
    pub(super) base_models: Vec<String>,
    /// Longest context of each model that has one, tokens. An adapter has that of its parent.
    pub(super) lengths: Vec<(String, u32)>,
    pub(super) owner: Option<String>,
    /// Number of models that the engine lists, those that are left out included.
    pub(super) count: usize,
}

#[derive(Deserialize)]
struct List {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    /// Some servers list models that they have not loaded without a name.
    id: Option<String>,
    owned_by: Option<String>,
    #[serde(default)]
    root: Value,
    /// `None`: it is not in the list.
    #[serde(default, deserialize_with = "some")]
    parent: Option<Value>,
    #[serde(default)]
    max_model_len: Value,
}

fn some<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(value).map(Some)
}

impl Model {
    fn length(&self) -> Option<u64> {
        self.max_model_len.as_u64()
    }

    fn root(&self) -> Option<&str> {
        self.root.as_str().or(self.id.as_deref())
    }

    /// Returns the name of the parent, as the engine gives it.
    fn parent(&self) -> Option<&str> {
        self.parent.as_ref()?.as_str()
    }
}

/// The names that adapters give to their parents.
struct Parents<'a> {
    ids: HashSet<&'a str>,
    /// Models without a parent.
    bases: Vec<&'a Model>,
    /// The first name of the only model, which may be listed under several.
    only: Option<&'a str>,
}

impl<'a> Parents<'a> {
    fn of(list: &'a [Model]) -> Self {
        let bases: Vec<&Model> = list.iter().filter(|model| model.parent().is_none()).collect();
        let first = bases.first().filter(|first| bases.iter().all(|base| base.root() == first.root()));
        let only = first.and_then(|first| first.id.as_deref());
        Self { ids: list.iter().filter_map(|model| model.id.as_deref()).collect(), only, bases }
    }

    /// Returns the listed parent of an adapter. vLLM reports the `base_model_name` of the adapter's module as
    /// its parent, which may be a name that the engine does not list: the path of the model, or any other.
    fn parent(&self, model: &'a Model) -> Option<&'a str> {
        let named = model.parent()?;
        if self.ids.contains(named) {
            return Some(named);
        }
        let base = self.bases.iter().find(|base| base.root() == Some(named));
        Some(base.and_then(|base| base.id.as_deref()).or(self.only).unwrap_or(named))
    }
}

/// Parses the response of `/v1/models`.
pub(super) fn models(body: &[u8]) -> Result<Models, String> {
    let mut list: List = serde_json::from_slice(body).map_err(|error| format!("GET /v1/models: {error}"))?;
    list.data.retain(|model| model.id.as_ref().is_some_and(|id| !id.is_empty()));
    let count = list.data.len();
    list.data.truncate(MAX_MODELS);
    let owner = list.data.first().and_then(|model| model.owned_by.clone());
    let parents = Parents::of(&list.data);
    let adapter = |model: &Model| Some((model.id.clone()?, parents.parent(model)?.to_owned()));
    let adapters = list.data.iter().filter_map(adapter).collect();
    let is_base = |model: &&Model| model.parent.as_ref().is_some_and(Value::is_null);
    let base_models = list.data.iter().filter(is_base).filter_map(|model| model.id.clone()).collect();
    let own: HashMap<&str, u64> =
        list.data.iter().filter_map(|model| Some((model.id.as_deref()?, model.length()?))).collect();
    let length = |model: &Model| {
        let length = model.length().or_else(|| own.get(parents.parent(model)?).copied())?;
        u32::try_from(length).ok().filter(|length| *length > 0)
    };
    let lengths = list.data.iter().filter_map(|model| Some((model.id.clone()?, length(model)?))).collect();
    let names = list.data.into_iter().filter_map(|model| model.id).collect();
    Ok(Models { adapters, base_models, lengths, names, owner, count })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_real_engines_are_parsed() {
        let listed = models(include_bytes!("../../../../tests/fixtures/engines/models.json")).unwrap();
        assert_eq!(
            listed,
            Models {
                names: vec!["tiny".into()],
                adapters: vec![],
                base_models: vec!["tiny".into()],
                lengths: vec![("tiny".into(), 2_048)],
                owner: Some("vllm".into()),
                count: 1,
            }
        );
        let names =
            models(include_bytes!("../../../../tests/fixtures/engines/vllm-0.33/prefill-models.json"));
        let lengths = vec![("tiny".into(), 2_048)];
        let expected = Models {
            names: vec!["tiny".into()],
            adapters: vec![],
            base_models: vec!["tiny".into()],
            lengths,
            owner: Some("vllm".into()),
            count: 1,
        };
        assert_eq!(names.unwrap(), expected);
    }

    #[test]
    fn an_adapter_has_the_context_of_its_parent_and_other_values_count_as_none() {
        let list = br#"{"data":[{"id":"a","max_model_len":4096},{"id":"a-1","parent":"a"},
            {"id":"b","max_model_len":"long"},{"id":"c","max_model_len":0},{"id":"d","parent":"x"}]}"#;
        let read = models(list).unwrap();
        assert_eq!(read.lengths, [("a".to_owned(), 4_096), ("a-1".to_owned(), 4_096)]);
        let pair = |one: &str, two: &str| (one.to_owned(), two.to_owned());
        assert_eq!(read.adapters, [pair("a-1", "a"), pair("d", "x")]);
        // B3.15: as vLLM's Rust frontend lists models, and its adapters
        assert_eq!(read.base_models, Vec::<String>::new(), "it does not say which are adapters");
        let list = br#"{"data":[{"id":"a","parent":null},{"id":"a-1","parent":"a"},{"id":"b","parent":7}]}"#;
        assert_eq!(models(list).unwrap().base_models, ["a"]);
    }

    #[test]
    fn b3_an_adapter_whose_parent_is_not_listed_has_the_model_of_that_path_or_the_only_one() {
        let parents = |list: &str| {
            let read = models(format!(r#"{{"data":[{list}]}}"#).as_bytes()).unwrap();
            let length =
                |name: &str| read.lengths.iter().find(|(of, _)| of == name).map(|(_, length)| *length);
            let show = |(name, parent): &(String, String)| format!("{name} {parent} {:?}", length(name));
            read.adapters.iter().map(show).collect::<Vec<_>>()
        };
        let a = r#"{"id":"a","root":"org/a","parent":null,"max_model_len":4096}"#;
        let alias = r#"{"id":"a-too","root":"org/a","parent":null,"max_model_len":4096}"#;
        let b = r#"{"id":"b","root":"org/b","max_model_len":512}"#;
        let adapters = r#"{"id":"1","root":"/l/1","parent":"org/a"},{"id":"2","root":"/l/2","parent":"x"}"#;
        // B3.13
        assert_eq!(parents(&format!("{a},{adapters}")), ["1 a Some(4096)", "2 a Some(4096)"]);
        assert_eq!(parents(&format!("{a},{alias},{adapters}")), ["1 a Some(4096)", "2 a Some(4096)"]);
        assert_eq!(parents(&format!("{b},{a},{adapters}")), ["1 a Some(4096)", "2 x None"]);
    }

    #[test]
    fn b3_only_the_first_models_of_an_engine_count() {
        let model = |number: usize| format!(r#"{{"id":"m{number}","parent":"m0","max_model_len":null}}"#);
        let list: Vec<String> = (0..MAX_MODELS + 5).map(model).collect();
        let read = models(format!(r#"{{"data":[{}]}}"#, list.join(",")).as_bytes()).unwrap();
        // B3.11
        assert_eq!(
            (read.names.len(), read.adapters.len(), read.count),
            (MAX_MODELS, MAX_MODELS, MAX_MODELS + 5)
        );
        assert_eq!(read.names.last().map(String::as_str), Some("m9999"));
    }

    #[test]
    fn entries_without_a_name_are_no_models() {
        let list =
            br#"{"data":[{"id":null,"owned_by":"x"},{"id":""},{"owned_by":"y"},{"id":"a","parent":null}]}"#;
        let read = models(list).unwrap();
        // B5.15
        assert_eq!((read.names, read.adapters), (vec!["a".to_owned()], vec![]));
        assert_eq!(models(br#"{"data":[{"id":null}]}"#).unwrap().names, Vec::<String>::new());
    }
}
