//! A message as templates see it.

use std::{fmt, sync::Arc};

use minijinja::{
    Value,
    value::{DynObject, Enumerator, Object},
};

use crate::python;

/// A map of role, content and further keys, in this order. Prints by Python's rules.
#[derive(Debug)]
pub(super) struct MessageValue {
    role: Value,
    content: Value,
    rest: Vec<(&'static str, Value)>,
}

impl MessageValue {
    /// Creates the value. `rest` has no key twice.
    pub(super) fn of(role: Value, content: Value, rest: Vec<(&'static str, Value)>) -> Value {
        Value::from_object(Self { role, content, rest })
    }
}

impl Object for MessageValue {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        match key {
            "role" => Some(self.role.clone()),
            "content" => Some(self.content.clone()),
            _ => self.rest.iter().find(|(known, _)| *known == key).map(|(_, value)| value.clone()),
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let rest = self.rest.iter().map(|(key, _)| *key);
        Enumerator::Values(["role", "content"].into_iter().chain(rest).map(Value::from).collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(2 + self.rest.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&python::text(&Value::from_dyn_object(DynObject::new(self.clone()))))
    }
}
