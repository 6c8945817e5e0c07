//! JSON of a request as template values that print like Python's.

use std::{fmt, sync::Arc};

use minijinja::{
    Value,
    value::{DynObject, Enumerator, Object, ObjectRepr},
};
use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, SeqAccess, Visitor},
};

use crate::python;

/// Converts JSON to a template value.
#[derive(Clone, Debug, Default)]
pub(crate) struct Json(pub(crate) Value);

/// A list or a map that prints by Python's rules.
#[derive(Debug)]
struct Shown(DynObject);

/// A map that keeps the order of its entries.
pub(crate) fn map(entries: impl IntoIterator<Item = (impl Into<Value>, Value)>) -> Value {
    python_value(entries.into_iter().map(|(key, value)| (key.into(), value)).collect::<Value>())
}

pub(crate) fn list(items: impl IntoIterator<Item = Value>) -> Value {
    python_value(Value::from(items.into_iter().collect::<Vec<Value>>()))
}

fn python_value(value: Value) -> Value {
    match value.as_object() {
        Some(object) => Value::from_object(Shown(object.clone())),
        None => value,
    }
}

impl Object for Shown {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        self.0.repr()
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get_value(key)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.0.get_value_by_str(key)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.0.enumerate()
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.0.enumerator_len()
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&python::text(&Value::from_dyn_object(self.0.clone())))
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyJson)
    }
}

struct AnyJson;

impl<'de> Visitor<'de> for AnyJson {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Json, E> {
        Ok(Json(Value::from(())))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Json, E> {
        Ok(Json(Value::from(value)))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Json, E> {
        Ok(Json(Value::from(value)))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Json, E> {
        Ok(Json(Value::from(value)))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Json, E> {
        Ok(Json(Value::from(value)))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Json, E> {
        Ok(Json(Value::from(value)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        let mut out = Vec::new();
        while let Some(Json(item)) = items.next_element()? {
            out.push(item);
        }
        Ok(Json(list(out)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Json, A::Error> {
        let mut out = Vec::new();
        while let Some((key, Json(value))) = entries.next_entry::<String, Json>()? {
            out.push((key, value));
        }
        Ok(Json(map(out)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_print_like_python_and_act_like_lists_and_maps() {
        let text = r#"{"b": [1, -2, 2.0, null, true, "it's"], "a": {}, "c": "é"}"#;
        let Json(value) = serde_json::from_str(text).unwrap();
        let run = |source: &str| minijinja::render!(source, v => value);
        assert_eq!(run("{{ '' ~ v }}"), r#"{'b': [1, -2, 2.0, None, True, "it's"], 'a': {}, 'c': 'é'}"#);
        assert_eq!(run("{{ v.b|upper }}"), r#"[1, -2, 2.0, NONE, TRUE, "IT'S"]"#);
        assert_eq!(run("{{ v|length }} {{ v.b|length }} {{ v|list|join }} {{ v.b[-1] }}"), "3 6 bac it's");
        assert_eq!(run("{{ v is mapping }} {{ v.b is sequence }} {{ v.a == {} }}"), "True True True");
        assert_eq!(
            run("{{ v.b[1:3] == [-2, 2.0] }} {{ v.nope is defined }} {{ 'c' in v }}"),
            "True False True"
        );
        assert_eq!(run("{% for k, x in v|items %}{{ k }}{% endfor %} {% if v.a %}a{% endif %}"), "bac ");
    }
}
