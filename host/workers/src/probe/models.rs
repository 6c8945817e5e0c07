//! Parses the models that an engine lists. No I/O.

use serde::Deserialize;
use serde_json::Value;

/// Models that an engine lists, and their owner, which names the engine.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Models {
    pub(super) names: Vec<String>,
    /// Those of the names that are adapters of a model, with this, their parent.
    pub(super) adapters: Vec<(String, String)>,
    /// Longest context of each model that has one, tokens. An adapter has that of its parent.
    pub(super) lengths: Vec<(String, u32)>,
    pub(super) owner: Option<String>,
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
    parent: Value,
    #[serde(default)]
    max_model_len: Value,
}

impl List {
    fn length(&self, model: &Model) -> Option<u32> {
        let is_parent =
            |parent: &&Model| parent.id.is_some() && model.parent.as_str() == parent.id.as_deref();
        let parent = || self.data.iter().find(is_parent);
        let own = |model: &Model| model.max_model_len.as_u64();
        let length = own(model).or_else(|| own(parent()?))?;
        u32::try_from(length).ok().filter(|length| *length > 0)
    }
}

/// Parses the response of `/v1/models`.
pub(super) fn models(body: &[u8]) -> Result<Models, String> {
    let mut list: List = serde_json::from_slice(body).map_err(|error| format!("GET /v1/models: {error}"))?;
    list.data.retain(|model| model.id.as_ref().is_some_and(|id| !id.is_empty()));
    let owner = list.data.first().and_then(|model| model.owned_by.clone());
    let adapter = |model: &Model| Some((model.id.clone()?, model.parent.as_str()?.to_owned()));
    let adapters = list.data.iter().filter_map(adapter).collect();
    let lengths = list.data.iter().filter_map(|model| Some((model.id.clone()?, list.length(model)?)));
    let lengths = lengths.collect();
    let names = list.data.into_iter().filter_map(|model| model.id).collect();
    Ok(Models { adapters, lengths, names, owner })
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
                lengths: vec![("tiny".into(), 2_048)],
                owner: Some("vllm".into())
            }
        );
        let names =
            models(include_bytes!("../../../../tests/fixtures/engines/vllm-0.33/prefill-models.json"));
        let lengths = vec![("tiny".into(), 2_048)];
        let expected =
            Models { names: vec!["tiny".into()], adapters: vec![], lengths, owner: Some("vllm".into()) };
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
