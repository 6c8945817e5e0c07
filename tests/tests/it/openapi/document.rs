//! An OpenAPI document: its operations, and whether an answer is one that it describes.

use std::collections::BTreeSet;

use pointsman_tests::client::Reply;
use serde_json::Value;

/// Keywords that say nothing about a value.
const NOTES: [&str; 3] = ["description", "contentMediaType", "format"];
const METHODS: [&str; 5] = ["get", "post", "put", "patch", "delete"];

pub(crate) struct Document(pub(crate) Value);

impl Document {
    /// Path and methods, in capitals.
    pub(crate) fn operations(&self) -> Vec<(String, BTreeSet<String>)> {
        let paths = self.0["paths"].as_object().unwrap();
        let methods = |item: &Value| {
            let methods = item.as_object().unwrap().keys();
            assert!(methods.clone().all(|method| METHODS.contains(&method.as_str())), "{item}");
            methods.map(|method| method.to_uppercase()).collect()
        };
        paths.iter().map(|(path, item)| (path.clone(), methods(item))).collect()
    }

    /// Says what of an answer the document does not describe.
    pub(crate) fn check(&self, method: &str, path: &str, reply: &Reply) -> Result<(), String> {
        let operation = &self.0["paths"][path][method.to_lowercase()];
        let status = reply.status.as_u16();
        let responses = &operation["responses"];
        let found = [status.to_string(), format!("{}XX", status / 100)]
            .into_iter()
            .find_map(|key| responses.get(&key));
        let response = self.followed(found.ok_or_else(|| format!("status {status} is not documented"))?);
        let kind = reply.headers.get("content-type").map_or("", |kind| kind.to_str().unwrap());
        let kind = kind.split(';').next().unwrap_or_default();
        let Some(contents) = response.get("content") else {
            return if reply.body.is_empty() {
                Ok(())
            } else {
                Err("the document has no content".to_owned())
            };
        };
        let range = format!("{}/*", kind.split('/').next().unwrap_or_default());
        let media = contents
            .get(kind)
            .or_else(|| contents.get(range))
            .ok_or_else(|| format!("content type `{kind}` is not documented"))?;
        let value = match kind {
            "application/json" => serde_json::from_slice(&reply.body).map_err(|error| error.to_string())?,
            _ => Value::String(String::from_utf8_lossy(&reply.body).into_owned()),
        };
        self.valid(&value, &media["schema"], "$")
    }

    fn followed<'a>(&'a self, schema: &'a Value) -> &'a Value {
        let Some(reference) = schema.get("$ref") else { return schema };
        self.0.pointer(reference.as_str().unwrap().strip_prefix('#').unwrap()).unwrap()
    }

    /// Checks the keywords that the documents use. Another keyword is an error, so that none is ignored.
    fn valid(&self, value: &Value, schema: &Value, at: &str) -> Result<(), String> {
        let schema = self.followed(schema);
        let refuse = |problem: String| Err(format!("{at}: {problem}"));
        for (keyword, wanted) in schema.as_object().unwrap() {
            match keyword.as_str() {
                "type" if !types(wanted).contains(&type_of(value)) => {
                    let whole = type_of(value) == "integer" && types(wanted).contains(&"number");
                    if !whole {
                        return refuse(format!("{} instead of {wanted}", type_of(value)));
                    }
                }
                "const" if value != wanted => return refuse(format!("{value} instead of {wanted}")),
                "enum" if !wanted.as_array().unwrap().contains(value) => {
                    return refuse(format!("{value} is not one of {wanted}"));
                }
                "required" => {
                    let missing = wanted
                        .as_array()
                        .unwrap()
                        .iter()
                        .find(|key| value.get(key.as_str().unwrap()).is_none());
                    if let (true, Some(missing)) = (value.is_object(), missing) {
                        return refuse(format!("{missing} is missing"));
                    }
                }
                "properties" => {
                    for (key, schema) in wanted.as_object().unwrap() {
                        if let Some(member) = value.get(key) {
                            self.valid(member, schema, &format!("{at}.{key}"))?;
                        }
                    }
                }
                "items" => {
                    for (place, item) in value.as_array().into_iter().flatten().enumerate() {
                        self.valid(item, wanted, &format!("{at}[{place}]"))?;
                    }
                }
                "pattern" => {
                    assert_eq!(wanted, "^[0-9a-f]{16}$", "a pattern that this check does not know");
                    let text = value.as_str().unwrap_or_default();
                    if text.len() != 16 || !text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
                        return refuse(format!("{value} does not match {wanted}"));
                    }
                }
                "type" | "const" | "enum" => {}
                keyword => {
                    assert!(NOTES.contains(&keyword), "a keyword that this check does not know: {keyword}")
                }
            }
        }
        Ok(())
    }
}

fn types(wanted: &Value) -> Vec<&str> {
    match wanted {
        Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
        one => one.as_str().into_iter().collect(),
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}
